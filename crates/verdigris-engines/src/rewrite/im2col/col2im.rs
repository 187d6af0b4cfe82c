//! col2im: products of pixels by taps and channels, added up where they meet.
//!
//! Each element of the result adds those of the products that reach it, tap after tap in the order of the filter, and passes through the
//! epilogue. Along a dimension the pixels `o` of the result meet
//!
//! - in fprop, product `o·s − pad + t·d` by tap `t`;
//! - in dgrad, product `(o + pad − t·d) / s` by the taps `t` for which it is whole. With `o + pad = q·s + ρ` these are `t = ρ + i·s`, and
//!   the product is `q − i`, where `d` is 1; without a stride `t = i`, and it is `q − i·d`.
//!
//! A row of the result is one line of pixels and channels, over which threads go side by side: over channels first, or over pixels where these are the
//! neighbours in memory.

use verdigris_graph::{ConvProblem, Direction};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::Special;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, KernelRef, Launch, SECTOR_BYTES};

use super::columns::{Columns, Side};
use crate::cost::{Stream, Traffic};
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec, OperandSpec};
use verdigris_tensor::DType;

/// Threads of a CTA.
const THREADS: u32 = 256;
/// Elements of the result that a thread has at a time.
const ELEMENTS: u32 = 4;

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Spec {
    epilogue: EpilogueSpec,
}

impl Spec {
    fn name(&self) -> String {
        format!("conv_fold_{}", self.epilogue.name())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        build(header, |k| col2im(k, self))
    }
}

/// The kernels of plain problems.
pub(super) fn catalog() -> impl Iterator<Item = KernelRef> {
    let plain = |dtype| Spec { epilogue: EpilogueSpec::plain(OperandSpec::strided(dtype)) };
    [DType::Bf16, DType::F16, DType::F32].into_iter().map(move |dtype| plain(dtype).kernel())
}

/// One dimension of the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Axis {
    /// `o · scale + addend = q · divisor + ρ`.
    scale: u64,
    addend: u64,
    divisor: u64,
    /// Turn `i` reads product `q + shift + i · step` by tap `ρ + i · tap_step`.
    shift: i64,
    step: i64,
    tap_step: u64,
    turns: u64,
    taps: u64,
    /// Products along the dimension.
    extent: u64,
    /// The column of tap 0, and from one tap to the next.
    first_column: i64,
    column_step: i64,
}

impl Axis {
    /// `None` where both stride and dilation are more than 1.
    fn new(p: &ConvProblem, columns: &Columns, dim: usize) -> Option<Axis> {
        let (stride, dilation, pad, taps) = (p.strides[dim], p.dilations[dim], p.pads_before[dim], p.filter[dim]);
        let columns = columns.taps[dim] as i64;
        let (first_column, column_step) = if p.flip { ((taps as i64 - 1) * columns, -columns) } else { (0, columns) };
        let common = Axis {
            scale: 1,
            addend: 0,
            divisor: 1,
            shift: 0,
            step: dilation as i64,
            tap_step: 1,
            turns: taps,
            taps,
            extent: p.input[dim],
            first_column,
            column_step,
        };
        match p.direction {
            Direction::Fprop => Some(Axis { scale: stride, shift: -(pad as i64), ..common }),
            _ if taps == 1 || stride == 1 || dilation == 1 => Some(Axis {
                addend: pad,
                divisor: stride,
                step: if stride == 1 { -(dilation as i64) } else { -1 },
                tap_step: stride,
                turns: taps.div_ceil(stride),
                extent: p.output[dim],
                ..common
            }),
            _ => None,
        }
    }

    fn arguments(&self) -> AxisArgs {
        AxisArgs {
            scale: self.scale as u32,
            addend: self.addend as u32,
            divisor: self.divisor as u32,
            shift: self.shift as i32,
            step: self.step as i32,
            tap_step: self.tap_step as u32,
            turns: self.turns as u32,
            taps: self.taps as u32,
            extent: self.extent as u32,
            first_column: self.first_column as i32,
            column_step: self.column_step as i32,
        }
    }
}

/// Products for col2im into the result.
#[derive(Clone, Debug)]
pub(super) struct Col2im {
    problem: ConvProblem,
    columns: Columns,
    axes: [Axis; 3],
    channels: u64,
    spec: Spec,
}

impl Col2im {
    /// The products of x's pixels into y, or of y's into x. `None` in wgrad, and with stride and dilation in one dimension of a dgrad.
    pub(super) fn new(p: &ConvProblem, columns: &Columns, side: Side) -> Option<Col2im> {
        let side_of_result = match p.direction {
            Direction::Fprop => Side::Y,
            Direction::Dgrad => Side::X,
            Direction::Wgrad => return None,
        };
        if side != side_of_result {
            return None;
        }
        let axis = |dim| Axis::new(p, columns, dim);
        let axes = [axis(0)?, axis(1)?, axis(2)?];
        // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
        let epilogue = EpilogueSpec::of_conv(p);
        let mut epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        epilogue.pairs = false;
        Some(Col2im { problem: p.clone(), columns: *columns, axes, channels: side.channels(p), spec: Spec { epilogue } })
    }

    /// Rows of the products.
    pub(super) fn rows(&self) -> u64 {
        self.axes.iter().fold(self.problem.n, |all, axis| all.saturating_mul(axis.extent))
    }

    /// Elements from one row of the products to the next: whole 16 bytes.
    pub(super) fn pitch(&self) -> u64 {
        self.columns.count.next_multiple_of(4)
    }

    /// The size of the products.
    pub(super) fn scratch_bytes(&self) -> u64 {
        self.rows().saturating_mul(self.pitch() * 4)
    }

    fn result(&self) -> [u64; 5] {
        self.problem.result_extents()
    }

    fn lines(&self) -> u64 {
        let [n, _, d, h, _] = self.result();
        n.saturating_mul(d).saturating_mul(h)
    }

    fn line_elements(&self) -> u64 {
        self.result()[4].saturating_mul(self.channels)
    }

    /// Whether pixels are nearer to each other in memory than channels, as those of channels-first tensors.
    fn is_along_pixels(&self) -> bool {
        let [_, channel, .., pixel] = self.problem.result().strides;
        self.channels > 1 && pixel < channel
    }

    /// Elements of a line that threads take side by side.
    fn neighbours(&self) -> u64 {
        if self.is_along_pixels() { self.result()[4] } else { self.channels }
    }

    /// Whether all that the kernel counts in 32 bits fits.
    pub(super) fn counts(&self) -> bool {
        let [_, _, d, h, w] = self.result();
        let fits = |(axis, extent): (&Axis, u64)| extent.saturating_mul(axis.scale).saturating_add(axis.addend) < 1 << 30;
        self.rows() < 1 << 30
            && self.lines() < 1 << 30
            && self.line_elements() < 1 << 24
            && self.axes.iter().zip([d, h, w]).all(fits)
            && self.axes.iter().all(|axis| (axis.turns as i64).saturating_mul(axis.step.abs()) < 1 << 30)
    }

    /// What it asks: bytes, and instructions for each element and product.
    pub(super) fn work(&self) -> Stream {
        let elements = self.lines() as f64 * self.line_elements() as f64;
        let turns: f64 = self.axes.iter().map(|axis| axis.turns as f64).product();
        // A run of neighbours writes whole sectors.
        let run_bytes = (self.neighbours() * self.problem.result().dtype.bytes() as u64) as f64;
        let result_bytes = elements / self.neighbours() as f64 * run_bytes.max(SECTOR_BYTES as f64);
        let issued = elements / 32.0 * (40.0 + 16.0 * turns);
        Stream::new(Traffic::Reduced, self.scratch_bytes() as f64 + result_bytes).issuing(issued)
    }

    /// The launch that reads the products at `from`.
    pub(super) fn launch(&self, from: Address) -> Launch {
        let [_, _, depth, height, _] = self.result();
        // Threads of a line: as few as have all of it at once.
        let threads = self.line_elements().div_ceil(u64::from(ELEMENTS)).next_power_of_two().clamp(8, u64::from(THREADS)) as u32;
        let passes = self.line_elements().div_ceil(u64::from(threads * ELEMENTS));
        let args = ValuesArgs {
            products: from,
            pitch_bytes: self.pitch() * 4,
            lines: self.lines() as u32,
            line_elements: self.line_elements() as u32,
            thread_bits: threads.ilog2(),
            heights: height as u32,
            depths: depth as u32,
            neighbours: self.neighbours() as u32,
            are_pixels: u32::from(self.is_along_pixels()),
            channel_columns: self.columns.channel as u32,
            axes: self.axes.each_ref().map(Axis::arguments),
            epilogue: self.spec.epilogue.conv_arguments(&self.problem),
        };
        let grid = [self.lines().div_ceil(u64::from(THREADS / threads)) as u32, passes as u32, 1];
        let launch = Launch::new(self.spec.clone().kernel(), grid, args.bound(&self.spec));
        // Measured, col2im of 5×5 taps take more than twice as long where they begin early (and let the next launch do so), those of
        // patches a little less. Not profiled; beside a product that has the shared memory little L1 is left, where products that several
        // pixels meet should stay.
        if self.axes.iter().all(|axis| axis.turns == 1) { launch.overlapping() } else { launch }
    }
}

verdigris_kir::parameters! {
    /// What the kernel reads, and its epilogue.
    struct Values / ValuesArgs of Spec as spec {
        products: Read = 16,
        pitch_bytes: u64,
        /// Rows of the result, and elements of each.
        lines: u32,
        line_elements: u32,
        /// Threads of a line are 2 to this.
        thread_bits: u32,
        heights: Divide,
        depths: Divide,
        /// Elements of a line that are side by side: 1 below, they are pixels, else channels.
        neighbours: Divide,
        are_pixels: u32,
        /// Columns from channel to channel.
        channel_columns: u32,
        /// Depth, height and width.
        axes: [AxisArgs; 3] = (),
        epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

verdigris_kir::parameters! {
    /// One dimension of the result, as [`Axis`] says.
    #[derive(Clone, Copy)]
    struct AxisValues / AxisArgs of () as _spec {
        scale: u32,
        addend: u32,
        divisor: Divide,
        shift: i32,
        step: i32,
        tap_step: u32,
        turns: u32,
        taps: u32,
        extent: u32,
        first_column: i32,
        column_step: i32,
    }
}

impl<'k> AxisValues<'k> {
    /// The first product that a pixel of the result meets, and its tap.
    fn first(&self, pixel: Val<'k, u32>) -> (Val<'k, i32>, Val<'k, u32>) {
        let (product, tap) = self.divisor.split(pixel * self.scale + self.addend);
        (product.signed() + self.shift, tap)
    }

    /// Of a turn: the product, its column, and whether both exist.
    fn at(&self, (product, tap): (Val<'k, i32>, Val<'k, u32>), turn: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, i32>, Val<'k, bool>) {
        let product = (product + turn.signed() * self.step).unsigned();
        let tap = tap + turn * self.tap_step;
        (product, self.first_column + tap.signed() * self.column_step, product.lt(self.extent) & tap.lt(self.taps))
    }
}

fn col2im<'k>(k: Kernel<'k>, spec: &Spec) {
    let values = Values::declare(k, spec);
    let Values {
        products,
        pitch_bytes,
        lines,
        line_elements,
        thread_bits,
        heights,
        depths,
        neighbours,
        are_pixels,
        channel_columns,
        axes,
        epilogue,
    } = values;
    let [depth, height, width] = axes;
    // What is in front of this launch may still run: nothing of it is touched above. What is behind begins when this one ends: a product
    // that came earlier would take the shared memory, and L1 with it.
    k.griddep_wait();

    let threads = k.constant(1u32).shl(thread_bits);
    let within = k.thread() & (threads - 1);
    let line = k.cta() * k.constant(THREADS).shr(thread_bits) + k.thread().shr(thread_bits);
    k.when(line.lt(lines), || {
        let (rest, h) = heights.split(line);
        let (image, d) = depths.split(rest);
        let (first_depth, first_height) = (depth.first(d), height.first(h));
        let first = k.special(Special::CtaY) * (threads * ELEMENTS) + within;
        let elements: Vec<_> = (0..ELEMENTS)
            .map(|i| {
                let element = first + threads * i;
                let (line_of, neighbour) = neighbours.split(element);
                let are_pixels = are_pixels.gt(0);
                let (w, channel) = (k.select(are_pixels, neighbour, line_of), k.select(are_pixels, line_of, neighbour));
                let column = (channel * channel_columns).signed();
                (element.lt(line_elements), w, channel, column, width.first(w), k.var(0.0f32))
            })
            .collect();
        k.range(depth.turns, |turn| {
            let (z, depth_column, has_depth) = depth.at(first_depth, turn);
            k.range(height.turns, |turn| {
                let (y, height_column, has_height) = height.at(first_height, turn);
                k.when(has_depth & has_height, || {
                    let row = ((image * depth.extent + z) * height.extent + y) * width.extent;
                    let line_column = depth_column + height_column;
                    k.range(width.turns, |turn| {
                        let found: Vec<(Var<'k, f32>, Var<'k, f32>)> = elements
                            .iter()
                            .map(|&(exists, _, _, column, first, sum)| {
                                let (x, width_column, has_width) = width.at(first, turn);
                                let from = products.address() + (row + x).widen() * pitch_bytes;
                                let column = (line_column + width_column + column).unsigned();
                                let product = k.var(0.0f32);
                                k.when(exists & has_width, || product.set(k.ld_global::<f32>(from + column.mul_wide(4), 0)));
                                (product, sum)
                            })
                            .collect();
                        for (product, sum) in found {
                            sum.set(sum.get() + product);
                        }
                    });
                });
            });
        });
        for (exists, w, channel, _, _, sum) in elements {
            k.when(exists, || {
                let place = epilogue.at_pixel([image, d, h, w], channel);
                place.store(place.apply(sum.get(), 0), 0);
            });
        }
    });
}
