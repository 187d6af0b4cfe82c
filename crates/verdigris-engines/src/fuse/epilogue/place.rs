//! An epilogue in a kernel: placed at an element of the result, applied to sums from there to the right.

use std::marker::PhantomData;
use std::panic::Location;

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_tensor::DType;

use super::{EpilogueSpec, Values};
use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::{Operand, OperandSpec, Walk};
use crate::fuse::steps::{Code, Operands, Step};
use crate::fuse::value::{AnyVal, Raw};
use crate::layout::batch::Indices;

/// An element of a tensor but for its channel: its first index (n, of a filter gradient k), depth, height and width.
pub(crate) type Pixel<'k> = [Val<'k, u32>; 4];

/// A declared epilogue that computes in `T`.
#[derive(Clone, Debug)]
pub struct Epilogue<'k, T: Compute = f32> {
    k: Kernel<'k>,
    spec: EpilogueSpec,
    values: Values<'k>,
    computed: PhantomData<fn() -> T>,
}

impl<'k> Epilogue<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: EpilogueSpec, values: Values<'k>) -> Self {
        Epilogue { k, spec, values, computed: PhantomData }
    }

    /// The same in the type that it computes in: f64 exactly where [`EpilogueSpec::double`] says so.
    pub fn of<T: Compute>(self) -> Epilogue<'k, T> {
        debug_assert_eq!(self.spec.double, T::DTYPE == DType::F64, "the compute type is the spec's");
        let Epilogue { k, spec, values, .. } = self;
        Epilogue { k, spec, values, computed: PhantomData }
    }
}

impl<'k, T: Compute> Epilogue<'k, T> {
    /// C, the operands of the steps, and D.
    fn operands(&self) -> impl Iterator<Item = (OperandSpec, &Operand<'k>)> {
        let Values { c, operands, d, .. } = &self.values;
        let specs = self.spec.steps.iter().filter_map(|step| step.strided()).map(|(spec, _)| *spec);
        self.spec.c.zip(c.as_ref()).into_iter().chain(specs.zip(operands)).chain(d.iter().map(|d| (self.spec.d, d)))
    }

    /// The same epilogue with its pair forms, for a branch in which an argument says that all operands lie in whole pairs: the spec then
    /// declares single elements, and the program the alignment of pairs where it takes the branch.
    pub fn paired(&self) -> Epilogue<'k, T> {
        let mut paired = self.clone();
        paired.spec.pairs = true;
        paired
    }

    /// Whether what is stored is to be added to what D holds, where the spec says that this is found out at run time.
    pub(crate) fn adds_to_d(&self) -> Option<Val<'k, bool>> {
        let Values { place_of_d, c, beta, .. } = &self.values;
        let (d, c, beta) = (place_of_d.as_ref()?, c.as_ref()?, beta.as_ref()?);
        let is_in_place = d.address().eq(c.start());
        Some(is_in_place & beta.get::<f32>().eq(1.0f32))
    }

    /// The factor of C, and whether C is read: neither where it is 0 nor where the store adds to it.
    fn beta(&self) -> Option<(Val<'k, T>, Val<'k, bool>)> {
        let beta = self.values.beta.map(|beta| beta.get::<T>())?;
        let is_read = beta.ne(T::constant(self.k, 0.0));
        Some((beta, self.adds_to_d().map_or(is_read, |adds| is_read & !adds)))
    }

    /// Whether two neighbouring columns may be accessed at once.
    pub(crate) fn has_pairs(&self) -> bool {
        self.spec.pairs
    }

    /// Places it at a column of rows that start at `starts`, one for each operand.
    pub(super) fn place(
        &self,
        alpha: Option<Val<'k, T>>,
        starts: impl Iterator<Item = Val<'k, u64>>,
        column: Val<'k, u32>,
    ) -> Place<'_, 'k, T> {
        let address = |((spec, operand), row_start): ((OperandSpec, &Operand<'k>), Val<'k, u64>)| match (spec.walk, operand.column_stride) {
            (Walk::Row, _) => row_start + column.mul_wide(spec.dtype.bytes() as u32),
            (Walk::Strided, Some(stride)) => row_start + column.widen() * stride,
            _ => row_start,
        };
        Place { epilogue: self, alpha, words: Vec::new(), addresses: self.operands().zip(starts).map(address).collect() }
    }

    /// The epilogue of one matrix of the batch. Reads the scale factors and the states of random numbers.
    #[track_caller]
    pub fn begin(&self, indices: Indices<'k>) -> MatrixEpilogue<'_, 'k, T> {
        let at = Location::caller();
        self.k.scope(at, || {
            let alpha = self.values.alpha.map(|alpha| {
                let scales = self.values.scales.iter();
                scales.fold(alpha.get(), |alpha, scale| alpha * T::from_f32(self.k.ld_global::<f32>(scale.address(), 0)))
            });
            let matrix = |(_, operand): (OperandSpec, &Operand<'k>)| match operand.batch {
                Some(batch) => batch.from(operand.start(), indices),
                None => operand.start(),
            };
            let matrices = self.operands().map(matrix).collect();
            let words =
                self.values.states.iter().map(|state| std::array::from_fn(|word| self.k.ld_global(state.address(), 4 * word as i64)));
            MatrixEpilogue { epilogue: self, alpha, matrices, words: words.collect() }
        })
    }

    /// Places an epilogue over tensors at a channel of a pixel.
    #[track_caller]
    pub(crate) fn at_pixel(&self, pixel: Pixel<'k>, channel: Val<'k, u32>) -> Place<'_, 'k, T> {
        let at = Location::caller();
        let start = |(_, operand): (OperandSpec, &Operand<'k>)| {
            let strides = operand.row_strides.iter();
            pixel.into_iter().zip(strides).fold(operand.start(), |address, (index, &stride)| address + index.widen() * stride)
        };
        channel.kernel().scope(at, || self.place(None, self.operands().map(start), channel))
    }

    /// Places an epilogue over vectors at a channel.
    pub(in crate::fuse) fn at_channel(&self, channel: Val<'k, u32>) -> Place<'_, 'k, T> {
        self.place(None, self.operands().map(|(_, vector)| vector.start()), channel)
    }

    /// The distance to the pixel `pixels` further along the width, or before.
    #[track_caller]
    pub(crate) fn width_step(&self, pixels: Val<'k, i32>) -> PixelStep<'k> {
        self.step(pixels, 3)
    }

    /// The distance to the pixel `pixels` further along the height, or before.
    #[track_caller]
    pub(crate) fn height_step(&self, pixels: Val<'k, i32>) -> PixelStep<'k> {
        self.step(pixels, 2)
    }

    #[track_caller]
    fn step(&self, pixels: Val<'k, i32>, index: usize) -> PixelStep<'k> {
        let at = Location::caller();
        let bytes = |(_, operand): (OperandSpec, &Operand<'k>)| pixels.widen().unsigned() * operand.row_strides[index];
        pixels.kernel().scope(at, || PixelStep(self.operands().map(bytes).collect()))
    }
}

/// How far an epilogue's operands are from one pixel to another of the same plane.
#[derive(Clone, Debug)]
pub(crate) struct PixelStep<'k>(Vec<Val<'k, u64>>);

/// An epilogue at one matrix of the batch.
#[derive(Clone, Debug)]
pub struct MatrixEpilogue<'e, 'k, T: Compute> {
    epilogue: &'e Epilogue<'k, T>,
    alpha: Option<Val<'k, T>>,
    matrices: Vec<Val<'k, u64>>,
    words: Vec<[Val<'k, u32>; 4]>,
}

impl<'e, 'k, T: Compute> MatrixEpilogue<'e, 'k, T> {
    /// The epilogue so many columns earlier: what it places at a column belongs to one that much further left. There may be none: the caller guards.
    #[track_caller]
    pub(crate) fn earlier(mut self, columns: Val<'k, u32>) -> Self {
        let at = Location::caller();
        self.epilogue.k.scope(at, || {
            for ((spec, operand), matrix) in self.epilogue.operands().zip(&mut self.matrices) {
                match (spec.walk, operand.column_stride) {
                    (Walk::Row, _) => *matrix = *matrix - columns.mul_wide(spec.dtype.bytes() as u32),
                    (Walk::Strided, Some(stride)) => *matrix = *matrix - columns.widen() * stride,
                    _ => {}
                }
            }
        });
        self
    }

    /// Places the epilogue at `(row, column)`; the addresses of all operands are computed here.
    #[track_caller]
    pub fn at(&self, row: Val<'k, u32>, column: Val<'k, u32>) -> Place<'e, 'k, T> {
        let at = Location::caller();
        self.epilogue.k.scope(at, || {
            let start =
                |((_, operand), &matrix): ((OperandSpec, &Operand<'k>), &Val<'k, u64>)| matrix + row.widen() * operand.row_strides[0];
            let starts = self.epilogue.operands().zip(&self.matrices).map(start);
            Place { words: self.words.clone(), ..self.epilogue.place(self.alpha, starts, column) }
        })
    }
}

/// An epilogue at one element, from which it reaches to the right.
#[derive(Clone, Debug)]
pub struct Place<'e, 'k, T: Compute> {
    epilogue: &'e Epilogue<'k, T>,
    alpha: Option<Val<'k, T>>,
    /// Those of each random state in memory.
    words: Vec<[Val<'k, u32>; 4]>,
    /// Of what has strides: addresses, and numbers of what counts.
    addresses: Vec<Val<'k, u64>>,
}

impl<'k, T: Compute> Place<'_, 'k, T> {
    /// Address and offset of operand `index`, `right` columns further on.
    fn reach(&self, index: usize, spec: OperandSpec, operand: &Operand<'k>, right: u32) -> (Val<'k, u64>, i64) {
        let address = self.addresses[index];
        match (spec.walk, operand.column_stride) {
            (Walk::Row, _) => (address, i64::from(right) * spec.dtype.bytes() as i64),
            (Walk::Strided, Some(stride)) if right > 0 => (address + stride * u64::from(right), 0),
            _ => (address, 0),
        }
    }

    /// The same channel of the pixel that is a step further; one addition an operand.
    #[track_caller]
    pub(crate) fn along(mut self, step: &PixelStep<'k>) -> Self {
        self.addresses.iter_mut().zip(&step.0).for_each(|(address, &bytes)| *address = *address + bytes);
        self
    }

    /// One element for all of `lanes` neighbours, or one for each.
    fn load(&self, index: usize, spec: OperandSpec, operand: &Operand<'k>, right: u32, lanes: u32) -> Vec<Val<'k, T>> {
        let (k, dtype) = (self.epilogue.k, spec.dtype);
        match (spec.walk, lanes) {
            (Walk::Row, 2) => {
                let (address, offset) = self.reach(index, spec, operand, right);
                compute::load_pair(k, dtype, address, offset).to_vec()
            }
            (walk, _) => (0..if walk == Walk::PerRow { 1 } else { lanes })
                .map(|lane| {
                    let (address, offset) = self.reach(index, spec, operand, right + lane);
                    compute::load(k, dtype, address, offset)
                })
                .collect(),
        }
    }

    fn write(&self, index: usize, spec: OperandSpec, operand: &Operand<'k>, right: u32, values: &[Val<'k, T>]) {
        let (k, dtype) = (self.epilogue.k, spec.dtype);
        if let (Walk::Row, &[low, high]) = (spec.walk, values) {
            let (address, offset) = self.reach(index, spec, operand, right);
            compute::store_pair(k, dtype, address, offset, [low, high]);
            return;
        }
        for (lane, &value) in (0..).zip(values) {
            let (address, offset) = self.reach(index, spec, operand, right + lane);
            compute::store(k, dtype, address, offset, value);
        }
    }

    /// Loads what the epilogue reads at `lanes` neighbouring elements, where they are `inside`. Called for several elements before [`Place::apply_fetched`]
    /// for the first of them, so that their loads are on their way together: a warpgroup's epilogue has few warps to wait behind each other.
    #[track_caller]
    pub(crate) fn fetch(&self, right: u32, lanes: u32, inside: Val<'k, bool>) -> Fetched<'k, T> {
        let at = Location::caller();
        let k = self.epilogue.k;
        k.scope(at, || {
            let EpilogueSpec { c, ref steps, .. } = self.epilogue.spec;
            let room = |spec: OperandSpec| -> Vec<Var<'k, T>> {
                (0..if spec.walk == Walk::PerRow { 1 } else { lanes }).map(|_| k.var(T::constant(k, 0.0))).collect()
            };
            let fill = |room: &[Var<'k, T>], index: usize, spec: OperandSpec, operand: &Operand<'k>| {
                room.iter().zip(self.load(index, spec, operand, right, lanes)).for_each(|(room, value)| room.set(value));
            };
            let c = match (self.epilogue.beta(), c, &self.epilogue.values.c) {
                (Some((_, is_read)), Some(spec), Some(operand)) => {
                    let room = room(spec);
                    k.when(inside & is_read, || fill(&room, 0, spec, operand));
                    room
                }
                _ => Vec::new(),
            };
            let all = ToTheRight { place: self, right, lanes };
            let read = |step: &Step<OperandSpec>| if let Step::Load(from) = step { Some(*from) } else { None };
            let loaded: Vec<Vec<Var<'k, T>>> = steps.iter().map(|step| read(step).map_or_else(Vec::new, room)).collect();
            if loaded.iter().any(|room| !room.is_empty()) {
                k.when(inside, || {
                    for (i, (step, room)) in steps.iter().zip(&loaded).enumerate() {
                        if let Some(from) = read(step) {
                            let (index, operand) = all.operand(i);
                            fill(room, index, from, operand);
                        }
                    }
                });
            }
            let got = |room: Vec<Var<'k, T>>| room.into_iter().map(|held| held.get()).collect();
            Fetched { inside, c: got(c), loaded: loaded.into_iter().map(got).collect() }
        })
    }

    fn run<const N: usize>(&self, sums: [Val<'k, T>; N], right: u32, fetched: Option<&Fetched<'k, T>>) -> [Val<'k, T>; N] {
        let k = self.epilogue.k;
        let mut values = sums;
        if let Some(alpha) = self.alpha {
            values = values.map(|sum| sum * alpha);
        }
        let EpilogueSpec { c, ref steps, .. } = self.epilogue.spec;
        let Values { c: c_values, numbers, .. } = &self.epilogue.values;
        if let (Some((beta, is_read)), Some(spec), Some(operand)) = (self.epilogue.beta(), c, c_values) {
            let with_c = values.map(|value| k.var(value));
            k.when(is_read, || {
                let c = fetched.map_or_else(|| self.load(0, spec, operand, right, N as u32), |fetched| fetched.c.clone());
                for (value, &c) in with_c.into_iter().zip(c.iter().cycle()) {
                    value.set(k.fma(beta, c, value));
                }
            });
            values = with_c.map(|value| value.get());
        }
        let code = Code { steps, numbers, computed: Some(T::DTYPE), lanes: N };
        let (given, there) = (values.map(AnyVal::of), ToTheRight { place: self, right, lanes: N as u32 });
        let all = match fetched {
            Some(fetched) => code.run(k, &given, &Held { there, fetched }),
            None => code.run(k, &given, &there),
        };
        // Loads and stores are never the last that gives a value.
        match all.iter().rfind(|value| !value.is_empty()) {
            Some(last) => std::array::from_fn(|lane| last[lane].get(k)),
            None => values,
        }
    }

    /// The result for a finished sum, `right` columns to the right of the place. Loads and stores what the chain says, but not D.
    #[track_caller]
    pub fn apply(&self, sum: Val<'k, T>, right: u32) -> Val<'k, T> {
        let at = Location::caller();
        self.epilogue.k.scope(at, || self.run([sum], right, None)[0])
    }

    /// The same for two neighbouring columns, of which the first is even.
    #[track_caller]
    pub fn apply_pair(&self, sums: [Val<'k, T>; 2], right: u32) -> [Val<'k, T>; 2] {
        assert!(self.epilogue.spec.pairs, "pairs need strides of whole pairs");
        let at = Location::caller();
        self.epilogue.k.scope(at, || self.run(sums, right, None))
    }

    /// The same for one column, or for two of which the first is even, with what was loaded ahead; outside of D, a number that nobody stores.
    #[track_caller]
    pub(crate) fn apply_fetched<const N: usize>(&self, sums: [Val<'k, T>; N], right: u32, fetched: &Fetched<'k, T>) -> [Val<'k, T>; N] {
        assert!(N == 1 || self.epilogue.spec.pairs, "pairs need strides of whole pairs");
        let at = Location::caller();
        self.epilogue.k.scope(at, || self.run(sums, right, Some(fetched)))
    }

    fn d(&self) -> Option<(usize, OperandSpec, &Operand<'k>)> {
        self.epilogue.values.d.as_ref().map(|d| (self.addresses.len() - 1, self.epilogue.spec.d, d))
    }

    /// Rounds and stores an element of D. Where the spec says that D is stored by other means, there is nothing to store to: a panic.
    #[track_caller]
    pub fn store(&self, value: Val<'k, T>, right: u32) {
        let (index, spec, d) = self.d().expect("the spec stores D");
        let at = Location::caller();
        self.epilogue.k.scope(at, || self.write(index, spec, d, right, &[value]));
    }

    /// Rounds and stores two neighbouring elements of D, of which the first is in an even column.
    #[track_caller]
    pub fn store_pair(&self, values: [Val<'k, T>; 2], right: u32) {
        assert!(self.epilogue.spec.pairs, "pairs need strides of whole pairs");
        let (index, spec, d) = self.d().expect("the spec stores D");
        let at = Location::caller();
        self.epilogue.k.scope(at, || self.write(index, spec, d, right, &values));
    }

    /// Rounds and stores eight neighbouring elements of D at once. The caller knows that they are neighbours in memory, whatever the spec says,
    /// that each eight begins at a multiple of 16 bytes, and that D is of a 16-bit float or f32.
    #[track_caller]
    pub fn store_eight(&self, values: [Val<'k, T>; 8], right: u32) {
        let (index, spec, _) = self.d().expect("the spec stores D");
        let at = Location::caller();
        let (k, dtype) = (self.epilogue.k, spec.dtype);
        k.scope(at, || compute::store_eight(k, dtype, self.addresses[index], i64::from(right) * dtype.bytes() as i64, values));
    }

    /// Stores an exact integer sum.
    #[track_caller]
    pub fn store_exact(&self, sum: Val<'k, i32>, right: u32) {
        let (index, spec, d) = self.d().expect("the spec stores D");
        let (address, offset) = self.reach(index, spec, d, right);
        self.epilogue.k.st_global(address, offset, sum);
    }
}

/// What an epilogue reads at one element or at two neighbours, loaded before it is applied there.
#[derive(Debug)]
pub(crate) struct Fetched<'k, T: Compute> {
    /// Whether the elements are D's: else nothing was loaded, and nothing is stored on the way.
    inside: Val<'k, bool>,
    c: Vec<Val<'k, T>>,
    /// Of each step, what it loads.
    loaded: Vec<Vec<Val<'k, T>>>,
}

/// The operands of steps, of which those that are read were loaded ahead.
#[derive(Clone, Copy)]
struct Held<'h, 'p, 'e, 'k, T: Compute> {
    there: ToTheRight<'p, 'e, 'k, T>,
    fetched: &'h Fetched<'k, T>,
}

impl<'k, T: Compute> Operands<'k, OperandSpec> for Held<'_, '_, '_, 'k, T> {
    fn load(&self, step: usize, _: &OperandSpec) -> Vec<AnyVal<'k>> {
        self.fetched.loaded[step].iter().map(|&value| AnyVal::of(value)).collect()
    }

    fn word(&self, step: usize, word: u32) -> AnyVal<'k> {
        self.there.word(step, word)
    }

    fn index(&self, step: usize) -> Vec<AnyVal<'k>> {
        self.there.index(step)
    }

    fn in_blocks(&self, step: usize) -> bool {
        self.there.in_blocks(step)
    }

    fn store(&self, step: usize, to: &OperandSpec, values: &[AnyVal<'k>]) {
        self.there.place.epilogue.k.when(self.fetched.inside, || self.there.store(step, to, values));
    }
}

/// The operands of steps at elements to the right of a place.
#[derive(Clone, Copy)]
struct ToTheRight<'p, 'e, 'k, T: Compute> {
    place: &'p Place<'e, 'k, T>,
    right: u32,
    lanes: u32,
}

impl<'p, 'k, T: Compute> ToTheRight<'p, '_, 'k, T> {
    /// The operand of a step, and its number among all.
    fn operand(&self, step: usize) -> (usize, &'p Operand<'k>) {
        let Epilogue { spec, values, .. } = self.place.epilogue;
        let number = spec.steps[..step].iter().filter(|step| step.strided().is_some()).count();
        (usize::from(spec.c.is_some()) + number, &values.operands[number])
    }
}

impl<'k, T: Compute> Operands<'k, OperandSpec> for ToTheRight<'_, '_, 'k, T> {
    fn load(&self, step: usize, from: &OperandSpec) -> Vec<AnyVal<'k>> {
        let (index, operand) = self.operand(step);
        self.place.load(index, *from, operand, self.right, self.lanes).into_iter().map(AnyVal::of).collect()
    }

    fn word(&self, step: usize, word: u32) -> AnyVal<'k> {
        let steps = &self.place.epilogue.spec.steps[..step];
        // The state is that of the last first word so far: this one, or one before it.
        let earlier = steps.iter().filter(|step| matches!(step, Step::Word(0))).count();
        let state = self.place.words[earlier - usize::from(word > 0)];
        AnyVal::Stored(DType::I32, Raw::B32(state[word as usize]))
    }

    /// The number that the last step in front of this one counts.
    fn index(&self, step: usize) -> Vec<AnyVal<'k>> {
        let steps = &self.place.epilogue.spec.steps[..step];
        let counts = steps.iter().rposition(|step| matches!(step, Step::Number(_))).expect("a random number is one of an element");
        let Step::Number(spec) = steps[counts] else { unreachable!("it counts") };
        let (index, operand) = self.operand(counts);
        let number = |lane: u32| {
            let (number, further) = self.place.reach(index, spec, operand, self.right + lane);
            AnyVal::I64((number + further as u64).bitcast())
        };
        (0..self.lanes).map(number).collect()
    }

    /// Two columns of which the first is even, and rows of whole pairs.
    fn in_blocks(&self, step: usize) -> bool {
        let steps = &self.place.epilogue.spec.steps[..step];
        let counts = steps.iter().rev().find_map(|step| if let Step::Number(spec) = step { Some(spec.walk) } else { None });
        self.lanes == 2 && self.place.epilogue.spec.pairs && counts == Some(Walk::Row)
    }

    fn store(&self, step: usize, to: &OperandSpec, values: &[AnyVal<'k>]) {
        let (index, operand) = self.operand(step);
        let values: Vec<_> = values.iter().map(|value| value.get(self.place.epilogue.k)).collect();
        self.place.write(index, *to, operand, self.right, &values);
    }
}
