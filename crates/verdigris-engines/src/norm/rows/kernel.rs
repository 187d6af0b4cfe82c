//! The kernel of rows, forward and backward, and its catalog.

use verdigris_graph::NormKind;
use verdigris_kir::face::{Header, Kernel, Pointer, Val, Var, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Write;
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::ahead::Ahead;
use super::bulk::{self, Bulk};
use super::shared_sums::SharedSums;
use super::{Along, NARROW_CTA, OperandSpec, Role, Spec};
use crate::fuse::compute::{self, Compute};
use crate::fuse::lanes;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Kept, Line, Packed, Strided};
use crate::fuse::value::{self, AnyVal};
use crate::layout::space::{Extents, Space};

/// Words of a vector that all rows share, which a thread keeps from row to row; of longer ones it reads its part again, from L1.
const KEPT_WORDS: u32 = 20;
/// The most bytes of a row that a thread keeps as they are computed with.
const MOST_WIDE_BYTES: u32 = 160;
/// The same of each of the two rows of a gradient, beside which it keeps sums as long.
const MOST_WIDE_BYTES_OF_GRADIENT: u32 = 128;
/// And a CTA, where scale and bias are kept so as well: one that ends, and one that stays, which is one of few.
const MOST_WIDE_BYTES_OF_CTA: [u32; 2] = [24 << 10, 32 << 10];
/// The most shared memory that an SM of any chip has: registers are shared out among as many CTAs as it lets be there.
const MOST_SHARED_BYTES_OF_SM: u32 = 228 << 10;
/// What each CTA takes of it beside its own.
const SHARED_BYTES_BESIDE: u32 = 1 << 10;

verdigris_kir::parameters! {
    /// Of the kernel of rows.
    pub(super) struct OfRows / OfRowsArgs of Spec as spec {
        pub(super) rows: u32,
        /// Rows from one turn of a CTA to its next.
        pub(super) step: u32,
        pub(super) extent: u32,
        /// Elements of a row, as a number, and one over it.
        pub(super) count: f64,
        pub(super) per_element: f64,
        pub(super) eps: f64,
        pub(super) space: Extents = spec.ranks[0],
        pub(super) elements: Extents = spec.ranks[1],
        pub(super) operands: Vec<OperandArgs> = spec.declarations(),
        pub(super) parts: PartsArgs = spec.clone(),
    }
}

verdigris_kir::parameters! {
    /// Where the sums of a CTA's rows go, a line for each CTA.
    pub(super) struct Parts / PartsArgs of Spec as spec {
        pub(super) scale: Option<Write> = spec.sums[0].then(|| spec.part_alignment_bytes()),
        pub(super) bias: Option<Write> = spec.sums[1].then(|| spec.part_alignment_bytes()),
    }
}

impl Spec {
    /// Dims that no operand asks for are none of the spec's.
    pub(super) fn plain_where_it_may_be(mut self) -> Spec {
        if self.operands.iter().all(|operand| self.strides_along(operand.along) == 0) {
            self.ranks[1] = 0;
        }
        self
    }

    /// The strides along a row that an operand has.
    pub(super) fn strides_along(&self, along: Along) -> usize {
        match along {
            Along::Line | Along::Shared | Along::Row => 0,
            Along::Outer => self.ranks[1].saturating_sub(1),
            Along::Strided => self.ranks[1],
        }
    }

    /// The strides that an operand has, those of the rows first.
    pub(super) fn strides_of(&self, along: Along) -> usize {
        if along == Along::Shared { 0 } else { self.ranks[0] + self.strides_along(along) }
    }

    fn declarations(&self) -> Vec<OperandDecl> {
        (self.operands.iter())
            .map(|&OperandSpec { role, dtype, along }| match along {
                Along::Line | Along::Shared => strided::lines_declaration(dtype, self.strides_of(along), self.vector, role.is_written()),
                _ => strided::declaration(dtype, self.strides_of(along), role.is_written()),
            })
            .collect()
    }

    fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    fn part_alignment_bytes(&self) -> u32 {
        (self.vector * self.bytes()).min(16)
    }

    /// Whether the kernel of rows has anything to do.
    pub(super) fn has_rows(&self) -> bool {
        self.sums.contains(&true) || self.operands.iter().any(|operand| operand.role.is_written())
    }

    /// Whether registers hold a row as it is computed with, from one step to the next: one that is not long, where no other is on its way to them. Beside a scale and a
    /// bias that are held so too, CTAs of long rows would be two to an SM (8,192 rows of 8,192 elements on an H200: 89 us, 72 otherwise).
    fn keeps_wide(&self) -> bool {
        let of_thread = self.held * self.vector * self.bytes();
        if self.once.is_none() && self.ahead == 0 || self.bulk > 0 {
            return false;
        }
        if self.backward {
            return of_thread <= MOST_WIDE_BYTES_OF_GRADIENT && !self.sums_in_shared;
        }
        let fits = self.kind == NormKind::Rms || self.threads() * of_thread <= MOST_WIDE_BYTES_OF_CTA[usize::from(self.once.is_none())];
        of_thread <= MOST_WIDE_BYTES && fits
    }

    /// Whether registers hold so much of a row that nothing should be loaded early.
    fn is_tight(&self) -> bool {
        self.sums_in_shared || (!self.backward && self.bulk == 0 && self.held * self.vector * self.bytes() > MOST_WIDE_BYTES)
    }

    fn threads(&self) -> u32 {
        let usual = if self.bulk > 0 { bulk::threads_of(self.team) } else { self.team.max(NARROW_CTA) };
        self.once.map_or(usual, |once| once.threads)
    }

    /// Rows that a CTA takes at a time.
    pub(super) fn rows_of_cta(&self) -> u32 {
        self.threads() / self.team
    }

    /// CTAs that stay on one SM with so much shared memory: as many as its threads and registers hold, by a count of what a thread keeps.
    pub(super) fn ctas_of_sm(&self, shared_bytes_of_sm: u32) -> u32 {
        let words = |dtype: DType| self.held * strided::words_of(dtype, self.vector);
        let compute = if self.double { DType::F64 } else { DType::F32 };
        let of = |has: &dyn Fn(&OperandSpec) -> bool| -> u32 {
            self.operands.iter().filter(|operand| has(operand)).map(|operand| words(operand.dtype)).sum()
        };
        // Each row as it is stored, and the next one where it is not in shared memory.
        let rows = if self.ahead > 0 { 1 } else { 2 } * of(&|operand| is_streamed(operand.role));
        let sums = self.sums.iter().filter(|&&summed| summed && !self.sums_in_shared).count() as u32;
        let is_kept = |operand: &OperandSpec| operand.along == Along::Shared && words(operand.dtype) <= KEPT_WORDS;
        // The sums, and the values of a row on their way; of wide rows, whose scale is not kept either, a forward kernel has those of one access. As many CTAs as the assembler
        // would let there be are slower where rows are short: 131072×128 takes 28.6 µs with 11 of them and 26.4 with 8 (H100).
        let on_their_way = if self.backward || self.held <= 4 || self.operands.iter().any(is_kept) { words(compute) } else { 0 };
        let registers = (48 + rows + sums * words(compute) + on_their_way).clamp(32, 255);
        let registers = if self.bulk > 0 { bulk::REGISTERS } else { registers };
        // Beside what is read ahead a CTA has the sums of its teams, at most.
        let left = self.bytes() * self.threads() * self.held * self.vector * if self.rows_of_cta() > 1 { sums } else { 0 };
        let shared_bytes = (self.ahead + self.bulk) * self.streamed_bytes() + left;
        (65_536 / (registers * self.threads()))
            .min(2048 / self.threads())
            .min(shared_bytes_of_sm / (shared_bytes + SHARED_BYTES_BESIDE))
            .max(1)
    }

    /// Bytes of the rows that a CTA takes at a time, of all that is read ahead.
    pub(super) fn streamed_bytes(&self) -> u32 {
        let streamed = self.operands.iter().filter(|operand| is_streamed(operand.role));
        streamed.map(|operand| self.held * self.threads() * self.vector * operand.dtype.bytes() as u32).sum()
    }

    fn name(&self) -> String {
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let kind = if self.kind == NormKind::Layer { "layer" } else { "rms" };
        let pass = if self.backward { "backward" } else { "forward" };
        let [rows, elements] = self.ranks;
        let operands: Vec<String> = (self.operands.iter())
            .map(|operand| {
                let along = match operand.along {
                    Along::Line => "",
                    Along::Shared => "c",
                    Along::Row => "r",
                    Along::Outer => "o",
                    Along::Strided => "s",
                };
                format!("{}{}{along}", operand.role.name(), operand.dtype)
            })
            .collect();
        let ahead = if self.ahead > 0 { format!("_ahead{}", self.ahead) } else { String::new() };
        let once = self.once.map_or(String::new(), |once| format!("_once{}", once.threads));
        let overlapped = flag(self.overlaps, "overlapped");
        let ahead = ahead + &if self.bulk > 0 { format!("_bulk{}", self.bulk) } else { String::new() };
        let streams = flag(self.streams[0], "loads") + &flag(self.streams[1], "stores");
        format!(
            "norm_rows_{kind}_{pass}{}{}{}{}_team{}x{}v{}{once}{ahead}{overlapped}{streams}_d{rows}x{elements}_{}",
            flag(self.zero_centred, "centred"),
            flag(self.double, "f64"),
            flag(self.sums[0], "dscale"),
            flag(self.sums[1], "dbias") + &flag(self.sums_in_shared, "shared"),
            self.team,
            self.held,
            self.vector,
            operands.join("_")
        )
    }

    pub(super) fn target(&self) -> Target {
        let own = if self.bulk > 0 || self.overlaps { Target::Sm90 } else { Target::Sm80 };
        compute::target_of_all(self.operands.iter().map(|operand| operand.dtype)).max(own)
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        // A CTA that stays has its place from the beginning: one more than there is room for would begin when others have ended.
        let min_ctas = if self.ahead > 0 || self.bulk > 0 { self.ctas_of_sm(MOST_SHARED_BYTES_OF_SM) } else { 1 };
        let header = Header { name: self.name(), target: self.target(), threads: self.threads(), min_ctas, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let OfRows { rows, step, extent, count, per_element, eps, space, elements, operands, parts } = OfRows::declare(k, self);
        if self.once.is_some() && self.overlaps {
            k.griddep_launch();
        }
        let thread = k.thread();
        let (team, member) = (thread >> self.team.ilog2(), thread & (self.team - 1));
        let operands: Vec<(OperandSpec, Strided<'k>)> =
            (self.operands.iter().zip(operands)).map(|(&spec, operand)| (spec, Strided::new(spec.dtype, operand))).collect();
        let share = Share {
            k,
            vectors: extent >> self.vector.ilog2(),
            member,
            team: self.team,
            held: if self.bulk > 0 { 0 } else { self.held },
            unroll: if self.bulk > 0 { bulk::UNROLL } else { 1 },
            vector: self.vector,
            // Rows are whole vectors, which the assembler does not know.
            zero: (!self.keeps_wide() && self.bulk == 0).then(|| extent & (self.vector - 1)),
        };
        let streamed: Vec<&(OperandSpec, Strided<'k>)> = operands.iter().filter(|(spec, _)| is_streamed(spec.role)).collect();
        let row_of = |first: Val<'k, u32>| {
            let row = first + team;
            // All threads stay together; those without a row take the last one and write nothing.
            (space.index(row.min(rows - 1)), row.lt(rows))
        };
        let room = || -> Vec<Vec<Kept<'k>>> {
            let of = |dtype: DType| (0..share.held).map(|_| Kept::new(k, dtype, self.vector)).collect();
            streamed.iter().map(|(spec, _)| of(spec.dtype)).collect()
        };
        let now = room();
        let next = if self.once.is_some() || self.ahead > 0 || self.bulk > 0 { Vec::new() } else { room() };
        let accesses: Vec<u32> = streamed.iter().map(|(spec, _)| self.vector * spec.dtype.bytes() as u32).collect();
        let whole: Vec<DType> = streamed.iter().map(|(spec, _)| spec.dtype).collect();
        let bulk = (self.bulk > 0).then(|| Bulk::new(&share, self.bulk, self.held, team, &whole));
        let ahead = (self.ahead > 0).then(|| Ahead::new(k, self.ahead, self.held, &accesses));
        // All loads before what they are kept in, so that none waits for another.
        let fetch = |first: Val<'k, u32>, to: &[Vec<Kept<'k>>]| {
            let (index, _) = row_of(first);
            let loaded: Vec<Vec<Packed<'k>>> = (streamed.iter())
                .map(|(_, operand)| {
                    let line = operand.line(&index, self.vector);
                    (0..self.held).map(|slot| line.load_once(share.nearest(slot), self.streams[0])).collect()
                })
                .collect();
            to.iter().flatten().zip(loaded.iter().flatten()).for_each(|(kept, loaded)| kept.set(loaded));
        };
        let vectors: Vec<Vector<'k>> = (operands.iter())
            .filter(|(spec, _)| matches!(spec.role, Role::Scale | Role::Bias))
            .map(|(spec, operand)| Vector::new(&share, *spec, operand, &elements))
            .collect();
        let in_shared = self.sums.map(|summed| (summed && self.sums_in_shared).then(|| SharedSums::new(&share, T::TY.bytes())));
        in_shared.iter().flatten().for_each(SharedSums::clear::<T>);
        let row = Row {
            spec: self,
            share,
            staged: bulk.as_ref(),
            in_shared: &in_shared,
            operands: &operands,
            streamed: &streamed,
            now: &now,
            vectors: &vectors,
            count: T::from_f64(count),
            per_element: T::from_f64(per_element),
            eps: T::from_f64(eps),
        };
        let sums: Vec<Option<Vec<Var<'k, T>>>> = (self.sums.iter())
            .map(|&summed| {
                (summed && !self.sums_in_shared).then(|| (0..self.held * self.vector).map(|_| k.var(T::constant(k, 0.0))).collect())
            })
            .collect();
        let first = k.cta() * self.rows_of_cta();
        if self.held > 0 && ahead.is_none() && bulk.is_none() {
            fetch(first, &now);
        }
        let take = |first: Val<'k, u32>| {
            let (index, inside) = row_of(first);
            if self.backward { row.backward(&index, inside, &sums) } else { row.forward(&index, inside) }
        };
        if let Some(bulk) = &bulk {
            let start = |first: Val<'k, u32>, number: u32| {
                let behind = first + step * number;
                k.when(behind.lt(rows), || {
                    let (index, _) = row_of(behind);
                    let lines: Vec<Line<'k>> = streamed.iter().map(|(_, operand)| operand.line(&index, self.vector)).collect();
                    bulk.start(&lines, extent);
                });
            };
            bulk.begin(|number| start(first, number));
            k.range_step(first, rows, step, |first| {
                bulk.wait();
                take(first);
                bulk.leave();
                start(first, self.bulk);
                bulk.go_on();
            });
            return;
        }
        if self.once.is_some() {
            take(first);
            if self.sums.contains(&true) {
                self.deliver(&share, team, &sums, [parts.scale, parts.bias]);
            }
            return;
        }
        // A row so many steps behind another, where there is one.
        let start = |first: Val<'k, u32>, ahead: &Ahead<'k>, number: u32, turn: Val<'k, u32>| {
            let behind = first + step * number;
            k.when(behind.lt(rows), || {
                let (index, _) = row_of(behind);
                let lines: Vec<Line<'k>> = streamed.iter().map(|(_, operand)| operand.line(&index, self.vector)).collect();
                ahead.start(&share, &lines, turn);
            });
        };
        ahead.iter().for_each(|ahead| ahead.begin(|number, turn| start(first, ahead, number, turn)));
        k.range_step(first, rows, step, |first| {
            if let Some(ahead) = &ahead {
                ahead.take(&now, |number, turn| start(first, ahead, number, turn));
            } else if self.held > 0 {
                k.when((first + step).lt(rows), || fetch(first + step, &next));
            }
            take(first);
            if self.reductions() == 1 && self.team > 32 {
                // The next row's sum lies where a slower warp still reads this one's. Where a row has several, their barriers lie between.
                k.bar_sync();
            }
            now.iter().flatten().zip(next.iter().flatten()).for_each(|(now, next)| now.set(&next.get()));
        });
        ahead.iter().for_each(|ahead| ahead.end());
        if self.overlaps {
            k.griddep_launch();
        }
        if self.sums.contains(&true) && !self.sums_in_shared {
            self.deliver(&share, team, &sums, [parts.scale, parts.bias]);
        }
        for (sums, to) in in_shared.iter().zip([parts.scale, parts.bias]) {
            if let (Some(sums), Some(to)) = (sums, to) {
                sums.deliver::<T>(to.address() + k.cta().mul_wide(extent) * u64::from(T::TY.bytes()));
            }
        }
    }

    /// How many times the threads of a team put something together for a row.
    fn reductions(&self) -> u32 {
        let has = |role: Role| self.operands.iter().any(|operand| operand.role == role);
        let of_statistics = match self.kind {
            _ if has(Role::Inv) => 0,
            NormKind::Layer => 2,
            NormKind::Rms => 1,
        };
        // The sums of a gradient are formed together with the last of those.
        of_statistics.max(u32::from(has(Role::Dx)))
    }

    /// Adds the sums of the CTA's teams up, and stores them as the CTA's line: teams leave them beside each other, and threads add up neighbouring columns.
    fn deliver<'k, T: Compute>(
        &self,
        share: &Share<'k>,
        team: Val<'k, u32>,
        sums: &[Option<Vec<Var<'k, T>>>],
        to: [Option<Pointer<'k>>; 2],
    ) {
        let present: Vec<(&[Var<'k, T>], Pointer<'k>)> =
            sums.iter().zip(to).filter_map(|(sums, to)| Some((sums.as_deref()?, to?))).collect();
        if self.rows_of_cta() == 1 {
            present.iter().for_each(|(sums, to)| self.deliver_own(share, sums, *to));
            return;
        }
        let (k, bytes) = (share.k, T::TY.bytes());
        let line_bytes = self.team * self.held * self.vector * bytes;
        let array_bytes = self.rows_of_cta() * line_bytes;
        let many = self.vector.min(16 / bytes);
        let lines = k.shared("lines", present.len() as u32 * array_bytes, 16).address();
        let of_vector = |number: usize| i64::from(number as u32 * array_bytes);
        for (number, (sums, _)) in present.iter().enumerate() {
            for slot in 0..self.held {
                let place = lines + team * line_bytes + share.number(slot) * (self.vector * bytes);
                let own: Vec<Val<'k, T>> =
                    sums[(slot * self.vector) as usize..][..self.vector as usize].iter().map(|sum| sum.get()).collect();
                for (part, values) in (0..).zip(own.chunks(many as usize)) {
                    let offset = of_vector(number) + i64::from(part * many * bytes);
                    k.st_shared_vector(place, offset, values);
                }
            }
        }
        k.bar_sync();
        let extent = share.vectors * self.vector;
        k.range_step(k.thread() * many, extent, self.threads() * many, |column| {
            for (number, (_, to)) in present.iter().enumerate() {
                let load =
                    |row: u32| k.ld_shared_vector::<T>(lines + column * bytes, of_vector(number) + i64::from(row * line_bytes), many as u8);
                let add = |x: Vec<Val<'k, T>>, y: Vec<Val<'k, T>>| x.into_iter().zip(y).map(|(x, y)| x + y).collect();
                let whole = (1..self.rows_of_cta()).map(load).fold(load(0), add);
                let values: Vec<AnyVal<'k>> = whole.into_iter().map(AnyVal::of).collect();
                let own = to.address() + (k.cta().mul_wide(extent) + column.widen()) * u64::from(bytes);
                value::store_values(k, T::DTYPE, own, &values);
            }
        });
    }

    /// The same of a CTA that is one team.
    fn deliver_own<'k, T: Compute>(&self, share: &Share<'k>, sums: &[Var<'k, T>], to: Pointer<'k>) {
        let (k, bytes) = (share.k, T::TY.bytes());
        let own = to.address() + k.cta().mul_wide(share.vectors * self.vector) * u64::from(bytes);
        share.each(|part| {
            let first = (part.slot.unwrap_or(0) * self.vector) as usize;
            let values: Vec<AnyVal<'k>> = sums[first..][..self.vector as usize].iter().map(|sum| AnyVal::of(sum.get())).collect();
            value::store_values(k, T::DTYPE, own + part.number.mul_wide(self.vector * bytes), &values);
        });
    }
}

/// What is loaded a row ahead.
pub(super) fn is_streamed(role: Role) -> bool {
    matches!(role, Role::X | Role::Residual | Role::Dy | Role::Dsum)
}

/// A thread's share of a row: vectors that are as many apart as the team has threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share<'k> {
    pub(super) k: Kernel<'k>,
    pub(super) vectors: Val<'k, u32>,
    pub(super) member: Val<'k, u32>,
    pub(super) team: u32,
    pub(super) held: u32,
    /// Vectors that are gone through together, where they are not held.
    pub(super) unroll: u32,
    pub(super) vector: u32,
    /// 0, but nobody can know: see [`Packed::again`]. None where what is widened is kept so.
    pub(super) zero: Option<Val<'k, u32>>,
}

/// One vector of a thread's share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'k> {
    /// Its number in the row.
    pub(super) number: Val<'k, u32>,
    /// Which of the vectors held it is.
    pub(super) slot: Option<u32>,
}

impl<'k> Share<'k> {
    /// What is kept as it is stored, for a further step.
    #[track_caller]
    fn again(&self, packed: &Packed<'k>) -> Packed<'k> {
        self.zero.map_or_else(|| packed.clone(), |zero| packed.again(zero))
    }

    #[track_caller]
    pub(super) fn number(&self, slot: u32) -> Val<'k, u32> {
        self.member + slot * self.team
    }

    /// The number of a vector of the share, the last one where the share has none.
    #[track_caller]
    pub(super) fn nearest(&self, slot: u32) -> Val<'k, u32> {
        self.number(slot).min(self.vectors - 1)
    }

    /// Runs `f` for each vector of the share.
    #[track_caller]
    pub(super) fn each(&self, f: impl Fn(Part<'k>)) {
        self.groups(|parts| parts.iter().for_each(|part| f(*part)));
    }

    /// Runs `f` for each group of vectors of the share whose loads overlap: one by one where they are held, or are not so many that they are gone through together.
    #[track_caller]
    fn groups(&self, f: impl Fn(&[Part<'k>])) {
        let k = self.k;
        for slot in 0..self.held {
            let number = self.number(slot);
            k.when(number.lt(self.vectors), || f(&[Part { number, slot: Some(slot) }]));
        }
        if self.held > 0 {
            return;
        }
        let together = self.unroll * self.team;
        let part = |number| Part { number, slot: None };
        // As many as this thread has in common with the others of its team.
        let whole = if self.unroll > 1 { self.member + (self.vectors & !(together - 1)) } else { self.member };
        if self.unroll > 1 {
            k.range_step(self.member, whole, together, |first| {
                f(&(0..self.unroll).map(|i| part(first + i * self.team)).collect::<Vec<_>>());
            });
        }
        k.range_step(whole, self.vectors, self.team, |number| f(&[part(number)]));
    }

    /// The sums over the team of what `f` gives for each vector of the share.
    #[track_caller]
    fn sums<T: Compute, const N: usize>(&self, f: impl Fn(Part<'k>) -> [Val<'k, T>; N]) -> [Val<'k, T>; N] {
        let k = self.k;
        let zero = T::constant(k, 0.0);
        let own: [Val<'k, T>; N] = if self.held == 0 {
            let sums: [Var<'k, T>; N] = std::array::from_fn(|_| k.var(zero));
            self.each(|part| sums.iter().zip(f(part)).for_each(|(sum, value)| sum.set(sum.get() + value)));
            sums.map(|sum| sum.get())
        } else {
            // Without a branch: where the share has no vector, that of another does not count.
            (0..self.held)
                .map(|slot| {
                    let inside = self.number(slot).lt(self.vectors);
                    f(Part { number: self.nearest(slot), slot: Some(slot) }).map(|value| k.select(inside, value, zero))
                })
                .reduce(|sums, values| std::array::from_fn(|i| sums[i] + values[i]))
                .unwrap_or([zero; N])
        };
        let lanes = own.map(|sum| lanes::over_lanes(k, self.team.min(32), sum, &|x, y| x + y));
        lanes::over_warps(k, self.team, lanes, &|x, y| std::array::from_fn(|i| x[i] + y[i]))
    }
}

/// A scale or a bias.
#[derive(Clone, Debug)]
struct Vector<'k> {
    spec: OperandSpec,
    operand: Strided<'k>,
    elements: Space<'k>,
    kept: Vec<Packed<'k>>,
}

/// A scale or a bias at a row, with the one element that it has for the row.
type AtRow<'v, 'k, T> = (&'v Vector<'k>, Strided<'k>, Option<Val<'k, T>>);

impl<'k> Vector<'k> {
    #[track_caller]
    fn new(share: &Share<'k>, spec: OperandSpec, operand: &Strided<'k>, elements: &Space<'k>) -> Vector<'k> {
        let words = share.held * strided::words_of(spec.dtype, share.vector);
        let is_kept = spec.along == Along::Shared && words <= KEPT_WORDS;
        let line = operand.line(&[], share.vector);
        let kept = if is_kept { (0..share.held).map(|slot| line.load(share.nearest(slot))).collect() } else { Vec::new() };
        Vector { spec, operand: operand.clone(), elements: elements.clone(), kept }
    }

    /// What a row has of it.
    #[track_caller]
    fn at_row<T: Compute>(&self, index: &[Val<'k, u32>]) -> AtRow<'_, 'k, T> {
        let own = if self.spec.along == Along::Shared { self.operand.clone() } else { self.operand.at(index) };
        let one = (self.spec.along == Along::Row).then(|| own.load::<T>(&[]));
        (self, own, one)
    }
}

/// The elements of a vector of a scale or a bias.
#[track_caller]
fn vector_values<'k, T: Compute>(share: &Share<'k>, (vector, own, one): &AtRow<'_, 'k, T>, part: Part<'k>) -> Vec<Val<'k, T>> {
    let (k, many) = (share.k, share.vector as usize);
    if let Some(one) = one {
        return vec![*one; many];
    }
    if let Some(kept) = part.slot.and_then(|slot| vector.kept.get(slot as usize)) {
        return share.again(kept).values(k);
    }
    let first = part.number * share.vector;
    match vector.spec.along {
        Along::Outer => {
            // All elements of an access have the same one.
            let mut index = vector.elements.index(first);
            index.pop();
            vec![own.load(&index); many]
        }
        Along::Strided => (0..share.vector).map(|i| own.load(&vector.elements.index(first + i))).collect(),
        Along::Line | Along::Shared | Along::Row => own.line(&[], share.vector).load(part.number).values(k),
    }
}

/// What the steps of a row share.
struct Row<'s, 'k, T: Compute> {
    spec: &'s Spec,
    share: Share<'k>,
    /// Where rows lie in shared memory.
    staged: Option<&'s Bulk<'k>>,
    operands: &'s [(OperandSpec, Strided<'k>)],
    streamed: &'s [&'s (OperandSpec, Strided<'k>)],
    now: &'s [Vec<Kept<'k>>],
    vectors: &'s [Vector<'k>],
    /// The sums that are the gradients of scale and bias, where shared memory holds them.
    in_shared: &'s [Option<SharedSums<'k>>; 2],
    count: Val<'k, T>,
    per_element: Val<'k, T>,
    eps: Val<'k, T>,
}

/// Operands by what they are.
type ByRole<V> = Vec<(Role, V)>;

fn find<V>(list: &[(Role, V)], role: Role) -> Option<&V> {
    list.iter().find(|(known, _)| *known == role).map(|(_, value)| value)
}

/// The sum of neighbours, in pairs.
fn total<'k, T: Compute>(values: &[Val<'k, T>]) -> Val<'k, T> {
    let mut values = values.to_vec();
    while values.len() > 1 {
        values = values.chunks(2).map(|pair| if let [x, y] = *pair { x + y } else { pair[0] }).collect();
    }
    values[0]
}

/// The sum of products of neighbours, in two chains.
fn dot<'k, T: Compute>(x: &[Val<'k, T>], y: &[Val<'k, T>]) -> Val<'k, T> {
    let products = |first: usize| {
        let mut pairs = x.iter().zip(y).skip(first).step_by(2);
        let (&x, &y) = pairs.next()?;
        Some(pairs.fold(x * y, |sum, (&x, &y)| x.kernel().fma(x, y, sum)))
    };
    match (products(0), products(1)) {
        (Some(even), Some(odd)) => even + odd,
        (one, _) => one.unwrap_or(x[0]),
    }
}

impl<'k, T: Compute> Row<'_, 'k, T> {
    fn k(&self) -> Kernel<'k> {
        self.share.k
    }

    /// The operands at a row.
    fn at(&self, index: &[Val<'k, u32>]) -> ByRole<Strided<'k>> {
        let is_row = |spec: &OperandSpec| !matches!(spec.role, Role::Scale | Role::Bias);
        self.operands.iter().filter(|(spec, _)| is_row(spec)).map(|(spec, operand)| (spec.role, operand.at(index))).collect()
    }

    /// The elements of a vector of a streamed operand: held as they are stored and widened again, or read again from where the row is.
    fn values(&self, row: &[(Role, Strided<'k>)], role: Role, part: Part<'k>) -> Option<Vec<Val<'k, T>>> {
        let place = self.streamed.iter().position(|(spec, _)| spec.role == role)?;
        let packed = match (part.slot, self.staged) {
            (Some(slot), _) => self.share.again(&self.now[place][slot as usize].get()),
            (None, Some(staged)) => staged.load(place, part.number),
            (None, None) => find(row, role)?.line(&[], self.share.vector).load(part.number),
        };
        Some(packed.values(self.k()))
    }

    /// What is normalized.
    fn normalized_values(&self, row: &[(Role, Strided<'k>)], part: Part<'k>) -> Vec<Val<'k, T>> {
        let x = self.values(row, Role::X, part).unwrap_or_default();
        match self.values(row, Role::Residual, part) {
            Some(residual) => x.into_iter().zip(residual).map(|(x, residual)| x + residual).collect(),
            None => x,
        }
    }

    /// `μ` and `r` of what is normalized.
    fn statistics(&self, row: &[(Role, Strided<'k>)]) -> [Val<'k, T>; 2] {
        let mean = self.mean(row);
        let [squares] = self.share.sums(|part| {
            let deviations = self.deviations(row, part, mean);
            [dot(&deviations, &deviations)]
        });
        [mean, self.inverse(squares)]
    }

    fn mean(&self, row: &[(Role, Strided<'k>)]) -> Val<'k, T> {
        match self.spec.kind {
            NormKind::Layer => {
                let [sum] = self.share.sums(|part| [total(&self.normalized_values(row, part))]);
                self.mean_of(sum)
            }
            NormKind::Rms => T::constant(self.k(), 0.0),
        }
    }

    /// `r`, of the sum of the squared deviations.
    fn inverse(&self, squares: Val<'k, T>) -> Val<'k, T> {
        T::rsqrt(self.mean_of(squares) + self.eps)
    }

    /// A sum over the elements, over their number.
    fn mean_of(&self, sum: Val<'k, T>) -> Val<'k, T> {
        // A division has branches, over which the assembler loads nothing early, and widens again what it widened before them.
        if self.spec.is_tight() {
            return T::quotient(sum, self.count);
        }
        let (k, near) = (self.k(), sum * self.per_element);
        let missing = k.fma(-near, self.count, sum);
        // Of an infinite sum nothing is missing.
        k.select(missing.eq(missing), k.fma(missing, self.per_element, near), near)
    }

    fn deviations(&self, row: &[(Role, Strided<'k>)], part: Part<'k>, mean: Val<'k, T>) -> Vec<Val<'k, T>> {
        self.normalized_values(row, part).into_iter().map(|value| self.deviation(value, mean)).collect()
    }

    fn deviation(&self, value: Val<'k, T>, mean: Val<'k, T>) -> Val<'k, T> {
        if self.spec.kind == NormKind::Layer { value - mean } else { value }
    }

    /// Writes what there is once a row.
    fn once(&self, row: &[(Role, Strided<'k>)], role: Role, inside: Val<'k, bool>, value: Val<'k, T>) {
        if let Some(to) = find(row, role) {
            self.k().when(inside & self.share.member.eq(0), || to.store(&[], AnyVal::of(value)));
        }
    }

    fn vectors_at(&self, index: &[Val<'k, u32>]) -> ByRole<AtRow<'_, 'k, T>> {
        self.vectors.iter().map(|vector| (vector.spec.role, vector.at_row(index))).collect()
    }

    /// `γ`, where there is a scale.
    fn gamma(&self, vectors: &[(Role, AtRow<'_, 'k, T>)], part: Part<'k>) -> Option<Vec<Val<'k, T>>> {
        let values = vector_values(&self.share, find(vectors, Role::Scale)?, part);
        let one = T::constant(self.k(), 1.0);
        Some(if self.spec.zero_centred { values.into_iter().map(|value| value + one).collect() } else { values })
    }

    fn forward(&self, index: &[Val<'k, u32>], inside: Val<'k, bool>) {
        let k = self.k();
        let row = self.at(index);
        let vectors = self.vectors_at(index);
        let [mean, inv] = self.statistics(&row);
        self.once(&row, Role::ToMean, inside, mean);
        self.once(&row, Role::ToInv, inside, inv);
        let write = |part: Part<'k>, values: Vec<Val<'k, T>>, [gamma, bias]: &[Option<Vec<Val<'k, T>>>; 2]| {
            self.store(&row, Role::Sum, part, &values);
            let results: Vec<Val<'k, T>> = (values.into_iter().enumerate())
                .map(|(i, value)| {
                    let h = self.deviation(value, mean) * inv;
                    match (gamma, bias) {
                        (Some(gamma), Some(bias)) => k.fma(h, gamma[i], bias[i]),
                        (Some(gamma), None) => h * gamma[i],
                        (None, Some(bias)) => h + bias[i],
                        (None, None) => h,
                    }
                })
                .collect();
            self.store(&row, Role::Y, part, &results);
        };
        k.when(inside, || {
            // All loads of a group before its first store, which none may pass.
            self.share.groups(|parts| {
                let bias = |part: Part<'k>| find(&vectors, Role::Bias).map(|bias| vector_values(&self.share, bias, part));
                let loaded: Vec<_> = (parts.iter())
                    .map(|&part| (part, self.normalized_values(&row, part), [self.gamma(&vectors, part), bias(part)]))
                    .collect();
                loaded.into_iter().for_each(|(part, values, vectors)| write(part, values, &vectors));
            });
        });
    }

    fn store(&self, row: &[(Role, Strided<'k>)], role: Role, part: Part<'k>, values: &[Val<'k, T>]) {
        if let Some(to) = find(row, role) {
            let line = to.line(&[], self.share.vector);
            if self.spec.streams[1] { line.store_streaming(part.number, values) } else { line.store(part.number, values) }
        }
    }

    fn backward(&self, index: &[Val<'k, u32>], inside: Val<'k, bool>, sums: &[Option<Vec<Var<'k, T>>>]) {
        let k = self.k();
        let row = self.at(index);
        let vectors = self.vectors_at(index);
        let dy = |part: Part<'k>| self.values(&row, Role::Dy, part).unwrap_or_default();
        let has_dx = find(&row, Role::Dx).is_some();
        let given = find(&row, Role::Inv).map(|inv| {
            let mean = find(&row, Role::Mean).map_or(T::constant(k, 0.0), |mean| mean.load::<T>(&[]));
            [mean, inv.load::<T>(&[])]
        });
        // What a vector adds to the gradients of scale and bias: `dy·h`, and `dy`.
        let add_to_vectors = |part: Part<'k>, dy: &[Val<'k, T>], h: &[Val<'k, T>]| {
            let slot = part.slot.unwrap_or(0);
            let with = |which: usize, i: usize, sum: Val<'k, T>| if which == 0 { k.fma(dy[i], h[i], sum) } else { sum + dy[i] };
            for (which, sums) in self.in_shared.iter().enumerate().filter_map(|(which, sums)| Some((which, (*sums)?))) {
                let next: Vec<Val<'k, T>> = sums.load::<T>(slot).into_iter().enumerate().map(|(i, sum)| with(which, i, sum)).collect();
                sums.store(slot, &next);
            }
            let first = (slot * self.share.vector) as usize;
            for (which, sums) in sums.iter().enumerate().filter_map(|(which, sums)| Some((which, sums.as_ref()?))) {
                sums[first..].iter().enumerate().take(dy.len()).for_each(|(i, sum)| sum.set(with(which, i, sum.get())));
            }
        };
        if !has_dx {
            let [mean, inv] = given.unwrap_or_else(|| self.statistics(&row));
            self.once(&row, Role::ToMean, inside, mean);
            self.once(&row, Role::ToInv, inside, inv);
            k.when(inside, || {
                self.share.each(|part| {
                    let h: Vec<Val<'k, T>> = self.deviations(&row, part, mean).into_iter().map(|deviation| deviation * inv).collect();
                    add_to_vectors(part, &dy(part), &h);
                });
            });
            return;
        }
        // The sums that are behind `r` are formed together with those of `g`, of deviations, so that threads meet once less.
        let mean = given.map_or_else(|| self.mean(&row), |[mean, _]| mean);
        let of_part = |part: Part<'k>| {
            let (deviations, dy) = (self.deviations(&row, part, mean), dy(part));
            let g = match self.gamma(&vectors, part) {
                Some(gamma) => dy.into_iter().zip(gamma).map(|(dy, gamma)| dy * gamma).collect(),
                None => dy,
            };
            (deviations, g)
        };
        let is_layer = self.spec.kind == NormKind::Layer;
        let zero = T::constant(k, 0.0);
        let (inv, of_g, product) = match (given, is_layer) {
            (Some([_, inv]), true) => {
                let [product, of_g] = self.share.sums(|part| {
                    let (deviations, g) = of_part(part);
                    [dot(&g, &deviations), total(&g)]
                });
                (inv, of_g, product)
            }
            (Some([_, inv]), false) => {
                let [product] = self.share.sums(|part| {
                    let (x, g) = of_part(part);
                    [dot(&g, &x)]
                });
                (inv, zero, product)
            }
            (None, true) => {
                let [squares, product, of_g] = self.share.sums(|part| {
                    let (deviations, g) = of_part(part);
                    [dot(&deviations, &deviations), dot(&g, &deviations), total(&g)]
                });
                (self.inverse(squares), of_g, product)
            }
            (None, false) => {
                let [squares, product] = self.share.sums(|part| {
                    let (x, g) = of_part(part);
                    [dot(&x, &x), dot(&g, &x)]
                });
                (self.inverse(squares), zero, product)
            }
        };
        self.once(&row, Role::ToMean, inside, mean);
        self.once(&row, Role::ToInv, inside, inv);
        let (of_g, of_product) = (-self.mean_of(of_g), -self.mean_of(product * inv));
        k.when(inside, || {
            self.share.each(|part| {
                let dsum = self.values(&row, Role::Dsum, part);
                let h: Vec<Val<'k, T>> = self.deviations(&row, part, mean).into_iter().map(|deviation| deviation * inv).collect();
                let dy = dy(part);
                add_to_vectors(part, &dy, &h);
                let gamma = self.gamma(&vectors, part);
                let results: Vec<Val<'k, T>> = (dy.into_iter().zip(h).enumerate())
                    .map(|(i, (dy, h))| {
                        let rest = if is_layer { k.fma(h, of_product, of_g) } else { h * of_product };
                        let rest = gamma.as_ref().map_or_else(|| dy + rest, |gamma| k.fma(dy, gamma[i], rest));
                        dsum.as_ref().map_or_else(|| rest * inv, |dsum| k.fma(rest, inv, dsum[i]))
                    })
                    .collect();
                self.store(&row, Role::Dx, part, &results);
            });
        });
    }
}
