//! Windows along the spatial dims: which elements a window has, and which windows an element.

use serde::{Deserialize, Serialize};
use verdigris_graph::Windows;
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::params::Divide;

use crate::fuse::compute::Compute;

/// What windows along a spatial dim are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    Sliding,
    Adaptive,
    Fractional,
}

impl Form {
    pub(super) fn of(windows: &Windows) -> Form {
        match windows {
            Windows::Sliding { .. } => Form::Sliding,
            Windows::Adaptive => Form::Adaptive,
            Windows::Fractional { .. } => Form::Fractional,
        }
    }
}

verdigris_kir::parameters! {
    /// Windows along a spatial dim.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Axis / AxisArgs of Form as form {
        pub(super) extent: u32,
        pub(super) out: u32,
        adaptive: Option<AdaptiveArgs> = (*form == Form::Adaptive).then_some(()),
        sliding: Option<SlidingArgs> = (*form == Form::Sliding).then_some(()),
        fractional: Option<FractionalArgs> = (*form == Form::Fractional).then_some(()),
    }
}

verdigris_kir::parameters! {
    /// What adaptive windows divide by.
    #[derive(Clone, Copy, Debug)]
    struct Adaptive / AdaptiveArgs of () as _spec {
        extent: Divide,
        out: Divide,
    }
}

verdigris_kir::parameters! {
    /// Of windows that slide.
    #[derive(Clone, Copy, Debug)]
    struct Sliding / SlidingArgs of () as _spec {
        taps: u32,
        stride: Divide,
        dilation: Divide,
        pad: u32,
    }
}

verdigris_kir::parameters! {
    /// Of windows that begin where samples say.
    #[derive(Clone, Copy, Debug)]
    struct Fractional / FractionalArgs of () as _spec {
        taps: u32,
        /// The elements that the dim has more than a window, at least 1.
        span: Divide,
    }
}

/// Windows along one spatial dim.
#[derive(Clone, Copy, Debug)]
enum Along<'k> {
    Sliding(Sliding<'k>),
    Adaptive(Adaptive<'k>),
    Fractional(Fractional<'k>),
}

/// Places along one dim: elements of a window, or windows that may hold an element.
#[derive(Clone, Copy, Debug)]
struct Range<'k> {
    first: Val<'k, u32>,
    count: Val<'k, u32>,
    step: Val<'k, u32>,
}

impl<'k> Axis<'k> {
    fn form(&self) -> Along<'k> {
        match (self.adaptive, self.fractional) {
            (Some(adaptive), _) => Along::Adaptive(adaptive),
            (None, Some(fractional)) => Along::Fractional(fractional),
            (None, None) => Along::Sliding(self.sliding.expect("windows that are neither adaptive nor fractional slide")),
        }
    }

    pub(super) fn args(extent: u32, out: u32, windows: &Windows) -> AxisArgs {
        let mut args = AxisArgs { extent, out, adaptive: None, sliding: None, fractional: None };
        match *windows {
            Windows::Adaptive => args.adaptive = Some(AdaptiveArgs { extent: extent.max(1), out: out.max(1) }),
            Windows::Sliding { taps, stride, dilation, pad_before } => {
                let [taps, stride, dilation, pad] = [taps, stride, dilation, pad_before].map(|count| count as u32);
                args.sliding = Some(SlidingArgs { taps, stride, dilation, pad });
            }
            Windows::Fractional { taps } => {
                let taps = taps as u32;
                args.fractional = Some(FractionalArgs { taps, span: extent.saturating_sub(taps).max(1) });
            }
        }
        args
    }

    /// The first element of fractional window `o` in a plane of this sample; none along other dims.
    pub(super) fn first<T: Compute>(&self, o: Val<'k, u32>, sample: Val<'k, T>) -> Val<'k, u32> {
        let Along::Fractional(Fractional { taps, .. }) = self.form() else { unreachable!("only fractional windows have samples") };
        let k = o.kernel();
        let (span, last) = (self.extent - taps, self.out - 1);
        let number = |count: Val<'k, u32>| T::from_i32(count.signed());
        // Divided here as everywhere: an argument would be of one type.
        let step = T::quotient(number(span), number(last.max(1)));
        // NaN is 0.
        let sample = sample.max(T::constant(k, 0.0)).min(T::constant(k, 1.0));
        let whole = |x: Val<'k, T>| x.convert::<i32>(CvtRound::IntZero).unsigned();
        let first = whole((number(o) + sample) * step) - whole(sample * step);
        k.select(o.eq(last), span, first)
    }

    /// The elements of fractional windows.
    fn fractional_taps(&self, first: Val<'k, u32>) -> Range<'k> {
        let Along::Fractional(Fractional { taps, .. }) = self.form() else { unreachable!("only fractional windows have samples") };
        Range { first, count: taps, step: first.kernel().constant(1) }
    }

    /// The taps of window `o`, padding and all.
    fn taps(&self, o: Val<'k, u32>) -> Val<'k, u32> {
        match self.form() {
            Along::Sliding(sliding) => sliding.taps,
            Along::Fractional(fractional) => fractional.taps,
            Along::Adaptive(_) => self.elements(o).count,
        }
    }

    /// The taps of window `o` that are elements.
    fn elements(&self, o: Val<'k, u32>) -> Range<'k> {
        let k = o.kernel();
        match &self.form() {
            Along::Sliding(Sliding { taps, stride, dilation, pad }) => {
                // The first tap at or behind element 0, and the first at or behind the end.
                let at = o * stride.value();
                let skipped = k.select(at.lt(*pad), dilation.quotient(*pad - at + dilation.value() - 1), 0u32);
                let end = self.extent + *pad;
                let reached = k.select(at.lt(end), dilation.quotient(end - at + dilation.value() - 1), 0u32).min(*taps);
                let count = k.select(reached.gt(skipped), reached - skipped, 0u32);
                Range { first: at + skipped * dilation.value() - *pad, count, step: dilation.value() }
            }
            Along::Adaptive(Adaptive { out, .. }) => {
                let begin = out.quotient(o * self.extent);
                let end = out.quotient((o + 1) * self.extent + self.out - 1);
                Range { first: begin, count: end - begin, step: k.constant(1) }
            }
            Along::Fractional(_) => unreachable!("fractional windows begin where samples say"),
        }
    }

    /// The windows that may hold element `i`.
    fn holders(&self, i: Val<'k, u32>) -> Range<'k> {
        let k = i.kernel();
        let (first, end) = match &self.form() {
            Along::Sliding(Sliding { taps, stride, dilation, pad }) => {
                let reach = (*taps - 1) * dilation.value();
                let behind = i + *pad;
                // ⌈(behind − reach) / stride⌉, or 0, to ⌊behind / stride⌋.
                let first = k.select(behind.gt(reach), stride.quotient(behind - reach + stride.value() - 1), 0u32);
                (first, (stride.quotient(behind) + 1).min(self.out))
            }
            // Window o holds i where ⌊o · extent / out⌋ ≤ i < ⌈(o + 1) · extent / out⌉.
            Along::Adaptive(Adaptive { extent, .. }) => {
                (extent.quotient(i * self.out), extent.quotient((i + 1) * self.out + self.extent - 1).min(self.out))
            }
            // Whatever its sample is, window o begins within two elements of o · span / (out − 1): within one, and rounding moves it by less than another.
            Along::Fractional(Fractional { taps, span }) => {
                let last = self.out - 1;
                let behind = k.select(i.gt(*taps + 1), i - *taps - 1, 0u32);
                (span.quotient(behind * last + span.value() - 1), (span.quotient((i + 2) * last) + 1).min(self.out))
            }
        };
        Range { first, count: k.select(end.gt(first), end - first, 0u32), step: k.constant(1) }
    }

    /// Tap `number` of windows that slide without dilation, counted from the first of window `o` on: the element, or beyond the image the last one on that side, and
    /// whether it is none of these.
    fn tap(&self, o: Val<'k, u32>, number: u32) -> (Val<'k, u32>, Val<'k, bool>) {
        let Along::Sliding(Sliding { stride, pad, .. }) = self.form() else { unreachable!("neighbouring windows slide") };
        let at = o * stride.value() + number;
        let place = (at.max(pad) - pad).min(self.extent - 1);
        (place, (place + pad).eq(at))
    }

    /// Whether a tap of window `o` is element `i`; windows that [`Axis::holders`] names may step over it.
    fn holds(&self, o: Val<'k, u32>, i: Val<'k, u32>) -> Val<'k, bool> {
        match &self.form() {
            Along::Sliding(Sliding { taps, stride, dilation, pad }) => {
                let distance = i + *pad - o * stride.value();
                let (tap, rest) = dilation.split(distance);
                rest.eq(0) & tap.lt(*taps)
            }
            Along::Adaptive(_) => {
                let Range { first, count, .. } = self.elements(o);
                (i - first).lt(count)
            }
            // The index says so.
            Along::Fractional(_) => o.kernel().constant(true),
        }
    }
}

/// One index for each spatial dim.
pub(super) type Place<'k> = [Val<'k, u32>; 3];

/// A place that loads may go to, and whether it counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Visit<'k> {
    pub(super) place: Place<'k>,
    /// Otherwise it is one of those that count, again.
    pub(super) counts: Val<'k, bool>,
}

/// Goes through the places of three ranges, row-major, in blocks of rows and columns whose loads overlap.
fn blocks<'k>(k: Kernel<'k>, ranges: [Range<'k>; 3], [high, wide]: [u32; 2], f: &dyn Fn(&[Visit<'k>])) {
    let [depth, height, width] = ranges;
    let all = |at: Val<'k, u32>, range: Range<'k>, many: u32| -> Vec<(Val<'k, u32>, Val<'k, bool>)> {
        let one = |i: u32| {
            let number = at + i;
            (range.first + number.min(range.count - 1) * range.step, number.lt(range.count))
        };
        (0..many).map(one).collect()
    };
    // Nothing is visited where one of the ranges is empty: loops over the others would find no place along that one.
    k.range(depth.count, |at| {
        let depth = depth.first + at * depth.step;
        k.range_step(0, height.count, high, |at| {
            let rows = all(at, height, high);
            k.range_step(0, width.count, wide, |at| {
                let columns = all(at, width, wide);
                let visit = |&(row, in_row): &(Val<'k, u32>, Val<'k, bool>), &(column, in_column): &(Val<'k, u32>, Val<'k, bool>)| Visit {
                    place: [depth, row, column],
                    counts: in_row & in_column,
                };
                let visits: Vec<Visit<'k>> = rows.iter().flat_map(|row| columns.iter().map(move |column| visit(row, column))).collect();
                f(&visits);
            });
        });
    });
}

/// Windows in a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid<'a, 'k> {
    pub(super) k: Kernel<'k>,
    pub(super) axes: &'a [Axis<'k>],
    /// Rows and columns that are visited together.
    pub(super) block: [u32; 2],
    /// The first element along each dim of this thread's window, where it is a fractional one.
    pub(super) firsts: [Option<Val<'k, u32>>; 3],
}

impl<'k> Grid<'_, 'k> {
    fn ranges(&self, of: impl Fn(usize) -> Range<'k>) -> [Range<'k>; 3] {
        std::array::from_fn(of)
    }

    /// The elements along a dim of the window at `o`.
    fn along(&self, axis: usize, o: Val<'k, u32>) -> Range<'k> {
        let axis_of = &self.axes[axis];
        self.firsts[axis].map_or_else(|| axis_of.elements(o), |first| axis_of.fractional_taps(first))
    }

    /// Runs `f` for the elements of a window, in row-major order, a block at a time.
    pub(super) fn elements(&self, out: Place<'k>, f: &dyn Fn(&[Visit<'k>])) {
        blocks(self.k, self.ranges(|axis| self.along(axis, out[axis])), self.block, f);
    }

    /// The first element of a window, and whether there is none.
    pub(super) fn first(&self, out: Place<'k>) -> (Place<'k>, Val<'k, bool>) {
        let ranges = self.ranges(|axis| self.along(axis, out[axis]));
        let none = ranges.map(|range| range.count.eq(0));
        (ranges.map(|range| range.first), none[0] | none[1] | none[2])
    }

    /// The columns of elements that neighbouring windows have from the one at `out` on, so many of them; whether each is one of the image.
    pub(super) fn columns(&self, out: Place<'k>, many: u32) -> Vec<(Val<'k, u32>, Val<'k, bool>)> {
        (0..many).map(|number| self.axes[2].tap(out[2], number)).collect()
    }

    /// Runs `f` for the rows of a window's elements, in order.
    pub(super) fn rows(&self, out: Place<'k>, f: &dyn Fn([Val<'k, u32>; 2])) {
        let [depth, height] = [0, 1].map(|axis| self.along(axis, out[axis]));
        self.k.range(depth.count, |at| {
            let depth = depth.first + at * depth.step;
            self.k.range(height.count, |at| f([depth, height.first + at * height.step]));
        });
    }

    /// Runs `f` for the windows that hold an element, in row-major order, a block at a time.
    pub(super) fn windows(&self, at: Place<'k>, f: &dyn Fn(&[Visit<'k>])) {
        blocks(self.k, self.ranges(|axis| self.axes[axis].holders(at[axis])), self.block, &|visits| {
            let held = |visit: &Visit<'k>| {
                let holds: [_; 3] = std::array::from_fn(|axis| self.axes[axis].holds(visit.place[axis], at[axis]));
                Visit { counts: visit.counts & holds[0] & holds[1] & holds[2], ..*visit }
            };
            f(&visits.iter().map(held).collect::<Vec<_>>());
        });
    }

    /// Taps of a window: all of them if padding counts, else its elements.
    pub(super) fn size(&self, out: Place<'k>, padded: bool) -> Val<'k, u32> {
        let along = |axis: usize| if padded { self.axes[axis].taps(out[axis]) } else { self.axes[axis].elements(out[axis]).count };
        along(0) * along(1) * along(2)
    }

    /// The place of an element as a number: row-major.
    pub(super) fn number(&self, [depth, height, width]: Place<'k>) -> Val<'k, u32> {
        (depth * self.axes[1].extent + height) * self.axes[2].extent + width
    }
}
