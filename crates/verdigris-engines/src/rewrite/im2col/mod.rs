//! `conv.unfolded`: convolutions in which one side has few channels, as one product beside an im2col of the activations or a col2im of the
//! products.
//!
//! **What.** Up to 48 channels of x or of y, one group, 16-bit operands and f32, any strides, dilations and padding, every
//! epilogue. Taps by the few channels become the columns (or the depth) of one product over pixels:
//!
//! | direction | few channels | before | product | behind |
//! |---|---|---|---|---|
//! | fprop | of x | im2col of x: pixels of y by taps and c | · w: taps and c by k | |
//! | fprop | of y | | x: pixels by c · w: c by taps and k | col2im into y |
//! | dgrad | of y, stride 1 | im2col of y: pixels of x by taps and k | · w: taps and k by c | |
//! | dgrad | of x | | y: pixels by k · w: k by taps and c | col2im into x |
//! | wgrad | of x | im2col of x | yᵀ: k by pixels · x: pixels by taps and c | |
//! | wgrad | of y, stride 1 | im2col of y | yᵀ: taps and k by pixels · x: pixels by c | |
//!
//! Tensors that the product reads or writes as they lie have their channels innermost, or their pixels; where pixels have no single stride over all
//! images, as those of channels-first tensors, images are a batch of products, and in wgrad each is a part.
//!
//! With an even number of channels of y, or eight of them before a col2im, the filter is copied first, k innermost within a tap, so that
//! they are read side by side. In wgrad the pixels may be cut into equal parts, a batch of products that a third launch adds up ([`sum`]).
//!
//! *im2col* makes a matrix of the activations with a row for each pixel that meets them ([`kernel`]). *col2im* adds the
//! products of one pixel by all taps to the pixels where they belong ([`col2im`]); these products are kept in f32. The product is that of
//! `gemm.wgmma`, whose knobs are this engine's, with `side` before them, 0 for few channels of x and 1 for few of y, and `cuts`, the number
//! of parts.
//!
//! **When it wins.** On compute capability 9.0. Where patches do not overlap (stride equal to the filter), as nothing is read twice then;
//! where few channels would fill a fraction of the tensor core's columns or of a row of 128 bytes of depth. The result of im2col crosses
//! the memory bus twice.
//!
//! Under the policy `fp32`, operands of f32 are three bf16 terms each ([`crate::terms`]). Those of an im2col matrix whose rows run along the depth are
//! written by im2col itself; others are copied by `gemm.wgmma`.
//!
//! **Numbers.** Products are exact. After im2col: sums as those of `gemm.wgmma`. With col2im: f32 sums over channels by the tensor core,
//! then over taps in the order of the filter. Repeats agree bit for bit. Zeros of the padding are multiplied, so an infinite filter element
//! gives NaN there; and in wgrad with few channels of y, an infinite x spreads over the taps that do not meet it.
//!
//! **Source:** Chellapilla et al., "High Performance Convolutional Neural Networks for Document Processing", 2006, for the product with
//! im2col.

mod col2im;
mod columns;
mod kernel;

use std::rc::Rc;

use verdigris_graph::{ConvProblem, Direction, GemmProblem, HostScalar, Matrix, Precision, Problem, Slot, Tensor};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::matrices::{of_images, over_matrices};
use crate::conv::geometry::require_elements;
use crate::cost::Work;
use crate::engine::{Candidate, EngineId, Knobs, Notes, Reason, Refusal, slot_count};
use crate::gemm;
use crate::layout::repack::{self, Repack, packed_tensor};
use crate::split_k::filter::im2col::{self as reduction, Sum};
use col2im::Col2im;
use columns::{Columns, Side};
use kernel::Im2col;

/// An accepted problem: the forms that it may take.
pub(super) struct Im2colProduct {
    problem: ConvProblem,
    arch: Arch,
    forms: Vec<Rc<Form>>,
}

/// A form, with a config of its product.
#[derive(Clone)]
pub(super) struct Config {
    form: Rc<Form>,
    product: Knobs,
}

const ID: EngineId = EngineId { name: "conv.unfolded", number: 210 };

/// The most channels of the side whose taps become columns; more in terms, which a product loads once for the six that it forms of them, where
/// convolutions by TMA load them for each.
const MOST_CHANNELS: u64 = 48;
const MOST_CHANNELS_OF_TERMS: u64 = 128;
/// The most columns: taps by channels.
const MOST_COLUMNS: u64 = 1 << 13;
/// The most scratch.
const MOST_BYTES: u64 = 512 << 20;
/// The most configs of a product that are offered.
const CONFIGS: usize = 20;
/// The knobs that tell which side has few channels, and how many parts the pixels of a wgrad are cut into.
const SIDE: &str = "side";
const CUTS: &str = "cuts";
/// The order of a filter's dims in which channels of y, at a c, lie side by side for each tap.
const TAPS_THEN_K: [usize; 4] = [2, 3, 4, 0];
/// So many channels of y are added side by side by col2im.
const ADDED_TOGETHER: u64 = 8;
/// The fewest pixels of a part, and those that would be multiplied while it is written.
const FEWEST_PIXELS: u64 = 128;
const PIXELS_OF_END: u64 = 512;
/// The most tiles of an SM, parts and all.
const MOST_WAVES: u64 = 4;

impl Algorithm for Im2colProduct {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(p) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("a {}; takes convolutions", problem.kind())));
        };
        ID.require(arch.runs(Target::Sm90a), Reason::Target, format_args!("compute capability {:?}, needs (9, 0)", arch.capability))?;
        require(p)?;
        let mut forms = Vec::new();
        let mut refusals = Vec::new();
        for side in Side::ALL {
            let counts = if by_images(p, side) && p.direction == Direction::Wgrad { vec![p.n] } else { part_counts(p, side, arch) };
            for &parts in &counts {
                match Form::new(p, side, [parts, counts.len() as u64], arch) {
                    Ok(form) => forms.push(Rc::new(form)),
                    Err(refusal) => refusals.push(refusal),
                }
            }
        }
        if forms.is_empty() {
            let reason = refusals.last().map_or(Reason::Extent, |refusal| refusal.reason);
            let said: Vec<String> = refusals.iter().map(|refusal| refusal.seen.clone()).collect();
            return Err(ID.refusal(reason, said.join("; ")));
        }
        Ok(Im2colProduct { problem: p.clone(), arch: arch.clone(), forms })
    }

    fn configs(&self) -> Vec<Config> {
        let of_form = |form: &Rc<Form>| {
            form.configs.iter().map(|product| Config { form: form.clone(), product: product.clone() }).collect::<Vec<_>>()
        };
        self.forms.iter().flat_map(of_form).collect()
    }

    fn knobs(Config { form, product }: &Config) -> Knobs {
        Knobs::new(product.iter().chain([(SIDE, form.side as u32), (CUTS, form.parts as u32)]))
    }

    fn notes(&self, Config { form, product }: &Config) -> Notes {
        let notes = form.product.notes(product).unwrap_or_else(|refusal| unreachable!("the product listed it: {refusal}"));
        Notes { accumulator: DType::F32, ..notes }
    }

    fn work(&self, Config { form, product }: &Config) -> Work {
        let work = form.product.work(product).unwrap_or_else(|refusal| unreachable!("the product listed it: {refusal}"));
        let (first, second) = match &form.beside {
            Beside::Before(im2col) => (im2col.work(), None),
            Beside::Around(im2col, sum) => (im2col.work(), Some(sum.work())),
            Beside::Behind(col2im) => (col2im.work(), None),
        };
        work.beside([first]).beside(second).beside(form.filter.as_ref().map(Repack::work))
    }

    fn lower(&self, Config { form, product }: &Config) -> Result<Program, Refusal> {
        let mut program = form.product.program(product)?;
        // Behind the convolution's own slots stand those at which launches meet.
        let meeting = form.meeting.0 as usize;
        program.buffer_alignment_bytes.resize(meeting, 1);
        match &form.beside {
            Beside::Before(im2col) | Beside::Around(im2col, _) => {
                let matrix = program.add_scratch("im2col of the activations", im2col.scratch_bytes());
                program.place_buffer(meeting, matrix);
                let launch = im2col.launch(matrix, &self.arch, &mut program);
                program.launch(launch);
                program.steps.rotate_right(1);
                if let Beside::Around(_, sum) = &form.beside {
                    let parts = program.add_scratch("parts of the filter's gradient", sum.scratch_bytes());
                    program.place_buffer(behind(form.meeting).0 as usize, parts);
                    program.launch(sum.launch(parts));
                }
            }
            Beside::Behind(col2im) => {
                let sums = program.add_scratch("products for col2im", col2im.scratch_bytes());
                program.place_buffer(meeting, sums);
                program.launch(col2im.launch(sums));
            }
        }
        if let Some(filter) = &form.filter {
            let copy = program.add_scratch("reordered filter", filter.scratch_bytes());
            program.place_buffer(copied(form.meeting).0 as usize, copy);
            let launches = filter.launches(Address::buffer(self.problem.w.slot.0 as usize), copy);
            let count = launches.len();
            launches.into_iter().for_each(|launch| program.launch(launch));
            program.steps.rotate_right(count);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        kernel::catalog()
            .chain(col2im::catalog())
            .chain(reduction::catalog())
            .chain(repack::catalog_of_filters([2, 4]))
            .chain(gemm::sums())
            .collect()
    }
}

/// What this engine asks of a problem, whichever side has few channels.
fn require(p: &ConvProblem) -> Result<(), Refusal> {
    let [(_, a, _), (_, b, _)] = p.operands();
    let takes = matches!(
        (p.precision, a.dtype, b.dtype),
        (Precision::Fp32, DType::Bf16, DType::Bf16)
            | (Precision::Fp32, DType::F16, DType::F16)
            | (Precision::Fp32 | Precision::Tf32, DType::F32, DType::F32)
    );
    ID.require(
        takes,
        Reason::Precision,
        format_args!("{:?} of {} and {}, taken are bf16, f16 and f32 under fp32, f32 under tf32", p.precision, a.dtype, b.dtype),
    )?;
    ID.require(
        p.prologue.is_empty() && p.statistics.is_none(),
        Reason::Epilogue,
        format_args!("{} steps on the activations, sums over channels: {}; takes neither", p.prologue.len(), p.statistics.is_some()),
    )?;
    ID.require(p.groups == 1, Reason::Extent, format_args!("{} groups, taken is one", p.groups))?;
    ID.require(!p.is_pointwise(), Reason::Extent, "each pixel of y reads one of x: a product as it stands")?;
    require_elements(ID, p)?;
    let bounded = |values: &[u64]| values.iter().all(|&value| value < 1 << 24);
    ID.require(
        bounded(&p.filter) && bounded(&p.strides) && bounded(&p.dilations) && bounded(&p.pads_before),
        Reason::Extent,
        format_args!(
            "filter {:?}, strides {:?}, dilations {:?}, padding {:?}; each below 2^24",
            p.filter, p.strides, p.dilations, p.pads_before
        ),
    )
}

/// Whether operands are cut into terms: those of f32, whatever the result is.
fn may_be_terms(p: &ConvProblem) -> bool {
    p.precision == Precision::Fp32 && p.operands().iter().all(|(_, operand, _)| operand.dtype == DType::F32)
}

/// The most channels of the side whose taps become columns.
fn most_channels(p: &ConvProblem) -> u64 {
    if may_be_terms(p) { MOST_CHANNELS_OF_TERMS } else { MOST_CHANNELS }
}

/// Whether the product is one of a batch of images: pixels of the side that it reads or writes as it lies have a single stride within an image
/// alone, as those of channels-first tensors.
fn by_images(p: &ConvProblem, side: Side) -> bool {
    let (tensor, extents) = if side == Side::X { (&p.y, p.y_extents()) } else { (&p.x, p.x_extents()) };
    tensor.pixel_stride(extents).is_none()
}

/// Into how many parts the pixels of a problem may be cut: 1, and of a wgrad what fills the chip best with tiles of 128 rows by 128 or 256
/// columns, among equal parts.
fn part_counts(p: &ConvProblem, side: Side, arch: &Arch) -> Vec<u64> {
    let mut counts = vec![1];
    let (channels, others) = (side.channels(p), if side == Side::X { p.k } else { p.c });
    if p.direction != Direction::Wgrad || others < 2 || channels > most_channels(p) {
        return counts;
    }
    let columns = p.filter.iter().fold(channels, |count, &extent| count.saturating_mul(extent));
    let grid = if side == Side::X { p.output } else { p.input };
    let pixels = grid.iter().fold(p.n, |all, &extent| all.saturating_mul(extent));
    let (rows, columns) = if side == Side::X { (others, columns) } else { (columns, others) };
    for tile_columns in [128, 256] {
        let tiles = rows.div_ceil(128).saturating_mul(columns.div_ceil(tile_columns));
        let sms = u64::from(arch.sm_count);
        // The pixels that one SM goes through, with those that the end of a part takes the time of.
        let pixels_of_sm = |parts: u64| (tiles * parts).div_ceil(sms) * (pixels / parts + PIXELS_OF_END);
        let most = (MOST_WAVES * sms / tiles).min(pixels / FEWEST_PIXELS);
        counts.extend((2..=most).filter(|&parts| pixels.is_multiple_of(parts)).min_by_key(|&parts| pixels_of_sm(parts)));
    }
    counts.dedup();
    counts
}

/// What stands beside the product.
enum Beside {
    Before(Im2col),
    /// The pixels are cut into parts.
    Around(Im2col, Sum),
    Behind(Col2im),
}

/// A form of the problem: which side has few channels, into how many parts the pixels are cut, and what stands beside the product.
struct Form {
    side: Side,
    parts: u64,
    beside: Beside,
    /// The filter's copy with k innermost.
    filter: Option<Repack>,
    product: Box<dyn Candidate>,
    /// Those of the product.
    configs: Vec<Knobs>,
    /// Where the product meets the im2col matrix or the input of col2im.
    meeting: Slot,
}

impl Form {
    fn new(p: &ConvProblem, side: Side, [parts, choices]: [u64; 2], arch: &Arch) -> Result<Form, Refusal> {
        let channels = side.channels(p);
        let of = if side == Side::X { "x" } else { "y" };
        ID.require(
            channels <= most_channels(p),
            Reason::Extent,
            format_args!("{channels} channels of {of}, taken are up to {}", most_channels(p)),
        )?;
        let count = p.filter.iter().fold(channels, |count, &extent| count.saturating_mul(extent));
        ID.require(
            count <= MOST_COLUMNS,
            Reason::Extent,
            format_args!("{count} taps by channels of {of}, taken are up to {MOST_COLUMNS}"),
        )?;
        let meeting = Slot(slot_count(&p.slots()) as u32);
        let adds_behind = matches!((p.direction, side), (Direction::Fprop, Side::Y) | (Direction::Dgrad, Side::X));
        // With k innermost, channels of y are read side by side. A filter lies otherwise, and is copied; parts of its gradient lie as they
        // are told.
        let wants_order = side == Side::Y
            && if adds_behind { channels >= ADDED_TOGETHER } else { (channels * p.y.dtype.bytes() as u64).is_multiple_of(4) };
        let reorders = wants_order && (p.direction != Direction::Wgrad || parts > 1);
        let ordered = |tensor: &Tensor| packed_tensor(tensor, p.w_extents(), 1, TAPS_THEN_K);
        let filter = (reorders && p.direction != Direction::Wgrad).then(|| Repack::of_tensor(&p.w, p.w_extents(), 1, TAPS_THEN_K));
        let original = p;
        let reordered = ConvProblem { w: ordered(&Tensor { slot: copied(meeting), ..p.w.clone() }), ..p.clone() };
        let p = if reorders { &reordered } else { original };
        let columns = Columns::of(p, side).ok_or_else(|| {
            ID.refusal(Reason::Layout, format_args!("w with strides {:?}; taps and channels of {of} must have a single one", p.w.strides))
        })?;
        // Rows of the im2col matrix are lines of depth, as those of terms; in wgrad the depth runs over pixels.
        let in_terms = may_be_terms(p) && p.direction != Direction::Wgrad && !adds_behind;
        let (beside, counts, bytes) = if adds_behind {
            let col2im = Col2im::new(p, &columns, side).ok_or_else(|| {
                ID.refusal(Reason::Extent, format_args!("strides {:?} and dilations {:?}; one of them must be 1", p.strides, p.dilations))
            })?;
            let (counts, bytes) = (col2im.counts(), col2im.scratch_bytes());
            (Beside::Behind(col2im), counts, bytes)
        } else {
            let im2col = Im2col::new(p, &columns, side, if in_terms { gemm::F32_TERMS } else { 1 }).ok_or_else(|| {
                ID.refusal(Reason::Extent, format_args!("strides {:?} with few channels of y; takes a stride of 1", p.strides))
            })?;
            let (counts, bytes) = (im2col.counts(), im2col.scratch_bytes());
            if parts > 1 {
                let sum = Sum::new(original, columns.part_layout(original), parts, im2col.rows() / parts);
                let (counts, bytes) = (counts && sum.counts(), bytes.saturating_add(sum.scratch_bytes()));
                (Beside::Around(im2col, sum), counts, bytes)
            } else {
                (Beside::Before(im2col), counts, bytes)
            }
        };
        ID.require(
            counts && bytes <= MOST_BYTES,
            Reason::Extent,
            format_args!("x, w, y of {:?}, {:?}, {:?}; too many for 32 bits, or for scratch", p.x_extents(), p.w_extents(), p.y_extents()),
        )?;
        let gemm = product(p, &columns, side, &beside, meeting)?;
        let halves = p.x.dtype.bytes() == 2 || p.y.dtype.bytes() == 2 && p.direction == Direction::Dgrad;
        // Of 16-bit operands whose sums stay in f32, there are kernels for these orders alone.
        ID.require(
            !halves || !(adds_behind || parts > 1) || gemm.a.column_stride == 1 || gemm.b.column_stride == 1,
            Reason::Layout,
            format_args!("x, w and y with strides {:?}, {:?}, {:?}; takes channels innermost", p.x.strides, p.w.strides, p.y.strides),
        )?;
        let product = if in_terms { gemm::of_terms(&gemm, arch) } else { gemm::HOPPER.accept(&Problem::Gemm(gemm), arch) };
        let product = product.map_err(|refusal| ID.refusal(refusal.reason, refusal.seen))?;
        let space = product.knobs();
        let keeps_sums = adds_behind || parts > 1;
        // Parts of the product's own are added up by one CTA a tile, which takes long where they are many.
        let whole = |knobs: &Knobs| choices == 1 || knobs.value("split") == Some(0);
        let listed = |knobs: &&Knobs| whole(knobs) && (!(keeps_sums && halves) || gemm::forms_sums(knobs));
        let configs: Vec<Knobs> = space.configs().iter().filter(listed).take(CONFIGS).cloned().collect();
        ID.require(!configs.is_empty(), Reason::Extent, "no tile suits the product")?;
        Ok(Form { side, parts, beside, filter, product, configs, meeting })
    }
}

/// The product, with the slots of the convolution and that at which it meets what stands beside it.
fn product(p: &ConvProblem, columns: &Columns, side: Side, beside: &Beside, meeting: Slot) -> Result<GemmProblem, Refusal> {
    let no_matrix = |tensor: &Tensor| {
        ID.refusal(Reason::Layout, format_args!("a tensor with strides {:?}; its pixels must have a single one", tensor.strides))
    };
    let by_images = by_images(p, side);
    let images = if by_images { p.n } else { 1 };
    let matrix_of = |tensor: &Tensor, extents: [u64; 5]| {
        let matrix = if by_images { of_images(tensor, extents) } else { tensor.as_matrix(extents) };
        matrix.ok_or_else(|| no_matrix(tensor))
    };
    let pixels = |tensor: &Tensor, extents: [u64; 5]| {
        let matrix = matrix_of(tensor, extents)?;
        ID.require(
            matrix.row_stride > 0 && (matrix.column_stride == 1 || matrix.row_stride == 1 || tensor.slot == p.result().slot),
            Reason::Layout,
            format_args!("a tensor with strides {:?}; channels of a pixel, or pixels, must lie side by side", tensor.strides),
        )?;
        Ok::<Matrix, Refusal>(matrix)
    };
    // What meets the pixels of each image: rows of a matrix that im2col or the product writes.
    let of_image = |matrix: Matrix, rows: u64| Matrix { batch_strides: vec![matrix.row_stride * rows; usize::from(by_images)], ..matrix };
    let filter = |tensor: &Tensor| {
        let matrix = columns.filter(tensor).ok_or_else(|| no_matrix(tensor))?;
        let batched = by_images && p.direction != Direction::Wgrad;
        Ok::<Matrix, Refusal>(Matrix { batch_strides: vec![0; usize::from(batched)], ..matrix })
    };
    // A filter is the other side's channels by columns.
    let w = || filter(&p.w);
    let (x, y) = (|| pixels(&p.x, p.x_extents()), || pixels(&p.y, p.y_extents()));
    let (a, b, d, [m, n, k]) = match beside {
        Beside::Around(im2col, sum) => {
            let dtype = if side == Side::X { p.x.dtype } else { p.y.dtype };
            let part = |matrix: Matrix| match &matrix.batch_strides[..] {
                // By images already.
                [_] => matrix,
                _ => Matrix { batch_strides: vec![matrix.row_stride * sum.pixels], ..matrix },
            };
            let columns_matrix = part(Matrix::row_major(meeting, dtype, im2col.pitch()));
            let sums = Matrix::row_major(behind(meeting), DType::F32, sum.layout.pitch);
            let sums = Matrix { batch_strides: vec![sum.part_elements()], ..sums };
            match side {
                Side::X => (part(y()?).transposed(), columns_matrix, sums, [p.k, columns.count, sum.pixels]),
                Side::Y => (columns_matrix.transposed(), part(x()?), sums, [columns.count, p.c, sum.pixels]),
            }
        }
        Beside::Behind(col2im) => {
            let (pixels, channels) = if side == Side::Y { (x()?, p.c) } else { (y()?, p.k) };
            let sums = Matrix::row_major(meeting, DType::F32, col2im.pitch());
            let rows = col2im.rows() / images;
            (pixels, w()?, of_image(sums, rows), [rows, columns.count, channels])
        }
        Beside::Before(im2col) => {
            let dtype = if side == Side::X { p.x.dtype } else { p.y.dtype };
            let rows = im2col.rows() / images;
            let columns_matrix = of_image(Matrix::row_major(meeting, dtype, im2col.pitch()), rows);
            match (p.direction, side) {
                (Direction::Wgrad, Side::X) => (y()?.transposed(), columns_matrix, w()?, [p.k, columns.count, rows]),
                (Direction::Wgrad, Side::Y) => (columns_matrix.transposed(), x()?, w()?.transposed(), [columns.count, p.c, rows]),
                (Direction::Fprop, _) => (columns_matrix, w()?.transposed(), y()?, [rows, p.k, columns.count]),
                (Direction::Dgrad, _) => (columns_matrix, w()?.transposed(), x()?, [rows, p.c, columns.count]),
            }
        }
    };
    let epilogue = match beside {
        Beside::Behind(_) | Beside::Around(..) => Vec::new(),
        Beside::Before(_) => over_matrices(&p.epilogue, |tensor| match (p.direction, side) {
            (Direction::Wgrad, Side::X) => filter(tensor),
            (Direction::Wgrad, Side::Y) => Ok(filter(tensor)?.transposed()),
            _ => matrix_of(tensor, p.result_extents()),
        })?,
    };
    GemmProblem {
        batch: match beside {
            Beside::Around(_, sum) => vec![sum.parts],
            _ if by_images => vec![images],
            _ => vec![],
        },
        m,
        n,
        k,
        precision: p.precision,
        determinism: p.determinism,
        a,
        b,
        c: None,
        scale_a: None,
        scale_b: None,
        alpha: HostScalar::ONE,
        beta: HostScalar::ZERO,
        epilogue,
        d,
    }
    .canonical()
    .map_err(|error| ID.refusal(Reason::Layout, error))
}

/// Where a product leaves its parts, if it meets the im2col matrix at this slot.
fn behind(meeting: Slot) -> Slot {
    Slot(meeting.0 + 1)
}

/// Where it finds the filter's copy.
fn copied(meeting: Slot) -> Slot {
    Slot(meeting.0 + 2)
}
