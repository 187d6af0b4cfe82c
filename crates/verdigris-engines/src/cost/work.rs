//! What a config asks of a chip, in counts. No time stands here.

use verdigris_graph::{ConvProblem, Direction, EpilogueStep, GemmProblem, Matrix, Order};
use verdigris_kir::program::SECTOR_BYTES;

/// A config's launches.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Work {
    /// The launch that multiplies; none where all launches stream.
    pub main: Option<Loop>,
    /// Launches that copy, sum or map: before, beside and behind it.
    pub beside: Vec<Stream>,
}

impl Work {
    /// Of a main loop.
    pub fn of(main: Loop) -> Work {
        Work { main: Some(main), beside: Vec::new() }
    }

    /// With launches beside it.
    #[must_use]
    pub fn beside(mut self, streams: impl IntoIterator<Item = Stream>) -> Work {
        self.beside.extend(streams);
        self
    }
}

/// How the parts of a tile whose depth is split come together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Join {
    /// Depth is whole.
    #[default]
    None,
    /// By the CTA that finishes last, through scratch: stream-K, split-K with a fixup.
    Fixup,
    /// Within a cluster, through its shared memory.
    Cluster,
    /// By a launch of its own, which reads the parts from scratch.
    Launch,
}

/// A launch whose CTAs walk over tiles, each in steps of depth.
///
/// Counts *of a step* are those of one CTA, in cycles that its SM would take if it had that SM to itself.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Loop {
    /// Whose main loop it is: `gemm.wgmma`, `conv.halo`. The fit knows kernels by this name.
    pub kernel: &'static str,
    /// Rows, columns and depth of one matrix of the product that the problem is, and how many matrices.
    pub product: [f64; 3],
    /// Matrices, or groups.
    pub matrices: f64,
    /// Of a convolution: elements of the filter for a pair of channels, the largest stride, and the width of the result; 1 elsewhere.
    pub window: [f64; 3],
    /// What else the problem says of itself.
    pub shape: Shape,
    /// Rows and columns of a CTA's tile.
    pub tile: [f64; 2],
    /// Tiles of CTAs, in all matrices; a split one counts once.
    pub tiles: f64,
    /// CTAs that are launched.
    pub grid: f64,
    /// CTAs that the chip holds at once.
    pub resident: f64,
    /// Steps of a whole tile, in the mean.
    pub steps: f64,
    /// Steps of the busiest place for a CTA, one CTA after the other.
    pub longest_steps: f64,
    /// Tiles that are begun there.
    pub longest_tiles: f64,
    /// Parts that the depth of a split tile is cut into.
    pub parts: f64,
    /// How these come together.
    pub join: Join,
    /// Of a step: cycles of the tensor cores.
    pub tensor_cycles: f64,
    /// Of a step: cycles of the fused multiply-adds.
    pub fma_cycles: f64,
    /// Of a step: bytes that pass shared memory.
    pub shared_bytes: f64,
    /// Of a step: bytes that come from L2.
    pub loaded_bytes: f64,
    /// Of a step: bytes of the operands that all CTAs of a wave read together, each counted once; 0 where nobody counts them. What they load beyond
    /// that comes from L2, and what does not stay there until the next wave comes from memory again.
    pub wave_bytes: f64,
    /// Of a step: instructions of warps beside the products.
    pub issued: f64,
    /// Of a tile: the same, outside of the steps.
    pub tile_issued: f64,
    /// Of a tile: bytes from L2 outside of the steps.
    pub tile_loaded_bytes: f64,
    /// Bytes of device memory if each operand and result passes once.
    pub traffic_bytes: f64,
    /// Bytes of an element of the operands.
    pub operand_bytes: f64,
    /// Bytes of an element of the result.
    pub result_bytes: f64,
    /// Threads of a CTA.
    pub threads: f64,
    /// CTAs of a cluster.
    pub cluster: f64,
    /// Stages of a CTA's ring.
    pub stages: f64,
    /// Bytes that one access of an operand takes: 16 and more by TMA and wide copies, less where operands are not aligned.
    pub copy_bytes: f64,
    /// Tiles run along the columns of the result, side by side.
    pub along_columns: bool,
    /// The result's rows are the columns of the tile.
    pub swap_ab: bool,
    /// Two consumers take tiles in turn, so that one's epilogue lies under the other's main loop.
    pub ping_pong: bool,
    /// Operands whose depth is not contiguous.
    pub across_depth: [bool; 2],
    /// Sums are promoted to registers, or formed in the epilogue.
    pub promoted: bool,
    /// Operands of the epilogue that have an element for each of the result.
    pub epilogue_operands: f64,
    /// Steps of the epilogue, those without operands among them.
    pub epilogue_steps: f64,
    /// How many times its bytes a load of A and of B counts: 1, and more where lines begin within sectors of L2. The fit does not see
    /// it but in the loaded bytes.
    pub load_cost: [f64; 2],
    /// Bytes of the result that one store takes: 16 and more by TMA.
    pub store_bytes: f64,
    /// Of a step: trips to memory that nothing of the same CTA hides.
    pub exposed: f64,
}

/// What a problem says of itself beside the product that it is.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Shape {
    /// The direction, of a convolution.
    pub direction: Option<Direction>,
    /// Channels of x and of y in a group.
    pub channels: [f64; 2],
    /// Elements of one image of x, and how many of its dims are more than one element.
    pub image: [f64; 2],
    /// Elements of a line of the filter, the largest dilation, and the most zeros in front of x.
    pub filter: [f64; 3],
    /// How lines of tensors are aligned, as the logarithm to base 2 of the largest power of two that divides them in elements, at most 10: rows, columns and depth of a product;
    /// channels of x and of y and a line of y of a convolution.
    pub alignment_log2: [f64; 3],
}

impl Shape {
    fn alignment_log2(extents: [u64; 3]) -> [f64; 3] {
        extents.map(|extent| f64::from(extent.trailing_zeros().min(10)))
    }

    fn of_gemm(gemm: &GemmProblem) -> Shape {
        Shape { alignment_log2: Shape::alignment_log2([gemm.m, gemm.n, gemm.k]), ..Shape::default() }
    }

    fn of_conv(conv: &ConvProblem) -> Shape {
        let most = |extents: [u64; 3]| extents.into_iter().max().unwrap_or(0) as f64;
        let wide = conv.input.iter().filter(|&&extent| extent > 1).count();
        Shape {
            direction: Some(conv.direction),
            channels: [conv.c, conv.k].map(|channels| (channels / conv.groups.max(1)) as f64),
            image: [conv.input.iter().product::<u64>() as f64, wide as f64],
            filter: [conv.filter[2] as f64, most(conv.dilations), most(conv.pads_before)],
            alignment_log2: Shape::alignment_log2([conv.c, conv.k, conv.output[2]]),
        }
    }
}

/// What a load of lines that begin within sectors of L2 counts for: see [`SECTOR_BYTES`].
const WITHIN_SECTORS: f64 = 1.8;

/// [`Loop::load_cost`] of a matrix.
fn load_cost(matrix: &Matrix) -> f64 {
    let strides = matrix.leading_dimension().into_iter().chain(matrix.batch_strides.iter().copied());
    let is_aligned = strides.into_iter().all(|stride| (stride * matrix.dtype.bytes() as u64).is_multiple_of(SECTOR_BYTES));
    if is_aligned { 1.0 } else { WITHIN_SECTORS }
}

impl Loop {
    /// What a product says of itself.
    pub fn of_gemm(kernel: &'static str, gemm: &GemmProblem) -> Loop {
        let batch = gemm.batch_count() as f64;
        let bytes = |(_, matrix, rows, columns): &(&str, &Matrix, u64, u64)| {
            let extent = |stride: u64, extent: u64| if stride == 0 { 1.0 } else { extent as f64 };
            extent(matrix.row_stride, *rows) * extent(matrix.column_stride, *columns) * batch * matrix.dtype.bytes() as f64
        };
        Loop {
            kernel,
            product: [gemm.m, gemm.n, gemm.k].map(|extent| extent as f64),
            matrices: batch,
            window: [1.0; 3],
            shape: Shape::of_gemm(gemm),
            traffic_bytes: gemm.matrices().iter().map(bytes).sum(),
            operand_bytes: gemm.a.dtype.bytes() as f64,
            result_bytes: gemm.d.dtype.bytes() as f64,
            across_depth: [gemm.a.order() != Order::RowMajor, gemm.b.order() == Order::RowMajor],
            epilogue_steps: gemm.epilogue.len() as f64,
            epilogue_operands: gemm
                .epilogue
                .iter()
                .filter(|step| is_full(step, |matrix| matrix.row_stride.min(matrix.column_stride) > 0))
                .count() as f64,
            parts: 1.0,
            copy_bytes: 16.0,
            load_cost: [&gemm.a, &gemm.b].map(load_cost),
            store_bytes: gemm.d.dtype.bytes() as f64,
            ..Loop::default()
        }
    }

    /// What a convolution says of itself, as the product that it is.
    pub fn of_conv(kernel: &'static str, conv: &ConvProblem) -> Loop {
        let extents = conv.gemm_extents();
        Loop {
            kernel,
            product: [extents.m, extents.n, extents.k].map(|extent| extent as f64),
            matrices: extents.groups as f64,
            window: [conv.filter.iter().product(), conv.strides.into_iter().max().unwrap_or(1), conv.output[2]]
                .map(|extent: u64| extent as f64),
            shape: Shape::of_conv(conv),
            traffic_bytes: conv.traffic_bytes(),
            operand_bytes: conv.operands()[0].1.dtype.bytes() as f64,
            result_bytes: conv.result().dtype.bytes() as f64,
            across_depth: [!conv.activations().is_channels_last(), false],
            epilogue_steps: conv.epilogue.len() as f64,
            epilogue_operands: conv
                .epilogue
                .iter()
                .filter(|step| is_full(step, |tensor| tensor.strides[4].max(tensor.strides[0]) > 0))
                .count() as f64,
            parts: 1.0,
            copy_bytes: 16.0,
            load_cost: [1.0; 2],
            store_bytes: conv.result().dtype.bytes() as f64,
            ..Loop::default()
        }
    }

    /// Sets how tiles are laid over the chip: each a CTA's, one after the other in whole waves, with the whole depth.
    #[must_use]
    pub fn in_waves(self, tiles: f64, resident: f64, steps: f64) -> Loop {
        let waves = (tiles / resident.max(1.0)).ceil().max(1.0);
        Loop { tiles, grid: tiles, resident, steps, longest_steps: waves * steps, longest_tiles: waves, ..self }
    }
}

/// Whether a step of an epilogue reads an element for each of the result.
fn is_full<P>(step: &EpilogueStep<P>, has_elements: impl Fn(&P) -> bool) -> bool {
    matches!(step, EpilogueStep::Binary { operand, .. } if has_elements(operand))
}

/// How a launch without a main loop goes through memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Traffic {
    /// Line by line.
    #[default]
    Lines,
    /// Through shared memory, for what is read along one dim and written along another.
    Transposed,
    /// By tiles in shared memory, with whole accesses on both sides.
    Tiles,
    /// Many parts of few results.
    Reduced,
}

/// A launch that streams through memory.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Stream {
    /// How.
    pub traffic: Traffic,
    /// Bytes read and written.
    pub bytes: f64,
    /// Instructions of warps.
    pub issued: f64,
    /// CTAs.
    pub ctas: f64,
    /// Launches.
    pub launches: f64,
    /// Turns of a thread that follow each other, each with loads whose numbers the next one waits for.
    pub turns: f64,
}

impl Stream {
    /// One launch of many CTAs.
    pub fn new(traffic: Traffic, bytes: f64) -> Stream {
        Stream { traffic, bytes, issued: 0.0, ctas: f64::INFINITY, launches: 1.0, turns: 0.0 }
    }

    /// With so many instructions of warps.
    #[must_use]
    pub fn issuing(self, issued: f64) -> Stream {
        Stream { issued, ..self }
    }

    /// In so many CTAs.
    #[must_use]
    pub fn of_ctas(self, ctas: f64) -> Stream {
        Stream { ctas, ..self }
    }

    /// With so many turns of a thread, one behind the other.
    #[must_use]
    pub fn in_turns(self, turns: f64) -> Stream {
        Stream { turns, ..self }
    }

    /// In so many launches.
    #[must_use]
    pub fn in_launches(self, launches: f64) -> Stream {
        Stream { launches, ..self }
    }
}
