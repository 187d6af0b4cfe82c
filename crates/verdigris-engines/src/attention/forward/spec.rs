//! What shapes the kernel.

use std::fmt;

use verdigris_kir::face::{Header, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, MapType, Target};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::wgmma_shape;
use verdigris_kir::tile::staging::STAGE_BYTES;

use super::super::function::{self, Source};
use super::super::half::Half;
use super::super::tile::HeadTile;
use super::kernel;
use crate::fuse::steps::Step;
use crate::hopper::{FIRST_BARRIER, SHARED_BYTES, WARPGROUP};

/// Queries of a warpgroup.
pub(super) const OWN_QUERIES: u32 = 64;

/// Shared memory of a CTA for tensors: all but what barriers and handed out tiles take.
const MOST_BYTES: u32 = SHARED_BYTES - 1024;

/// Which scores a kernel may mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mask {
    /// Keys beyond the last.
    End,
    /// And those right of a diagonal.
    Causal,
    /// Those on either side of a band, and beyond lengths; with sinks.
    Band,
}

impl Mask {
    const fn name(self) -> &'static str {
        match self {
            Mask::End => "end",
            Mask::Causal => "causal",
            Mask::Band => "band",
        }
    }
}

/// Everything that shapes the kernel; extents are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spec {
    /// Of results, and of queries, keys and values that are not of 8 bits.
    pub(super) ty: Half,
    /// Queries, keys and values are e4m3, with factors, and values lie as [`super::fp8`] turns them.
    pub(super) fp8: bool,
    /// Elements of a query and a key that are multiplied.
    pub(super) head: u32,
    /// Elements of a value: at most those of a query.
    pub(super) value: u32,
    /// Warpgroups that multiply, each 64 queries.
    pub(super) consumers: u32,
    /// Keys of one block.
    pub(super) block: u32,
    /// Blocks of keys, and of values, in shared memory at a time.
    pub(super) stages: u32,
    pub(super) mask: Mask,
    /// Consumers take turns at the tensor cores.
    pub(super) ping_pong: bool,
    /// Tiles are handed out on demand.
    pub(super) dynamic: bool,
    /// Something stands between the products and the softmax; with a mask of bands.
    pub(super) score_mod: bool,
    /// Queries of sequences lie behind each other, and their keys unless these are paged; with a mask of bands, and tiles that are handed out.
    pub(super) ragged: bool,
    /// Keys and values lie in pages; with a mask of bands, and tiles that are handed out.
    pub(super) paged: bool,
    /// Some pairs are dropped; with a mask of bands, and tiles that are handed out.
    pub(super) dropout: bool,
    /// Tiles go through lists of blocks; with a mask of bands, and tiles that are handed out.
    pub(super) listed: bool,
    /// The function of scores, where there is one: then something stands between the products and the softmax.
    pub(super) function: Vec<Step<Source>>,
}

impl fmt::Display for Spec {
    /// `attention_forward_bf16_d192_v128_m128_n112_s2_causal_dynamic`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { head, value, block, stages, .. } = self;
        let of_operands = if self.fp8 { "e4m3_" } else { "" };
        write!(
            f,
            "attention_forward_{of_operands}{}_d{head}_v{value}_m{}_n{block}_s{stages}_{}",
            self.ty.name(),
            self.queries(),
            self.mask.name()
        )?;
        let of_scores = [(self.ping_pong, "_pingpong"), (self.dynamic, "_dynamic"), (self.score_mod, "_scoremod")];
        let marks = of_scores.into_iter().chain([
            (self.ragged, "_ragged"),
            (self.paged, "_paged"),
            (self.dropout, "_dropout"),
            (self.listed, "_listed"),
        ]);
        marks.filter(|(has, _)| *has).try_for_each(|(_, name)| f.write_str(name))?;
        function::write_name(f, &self.function)
    }
}

impl Spec {
    /// Whether something is done to each score for which a second loop, without a mask, takes much room for instructions.
    pub(super) const fn has_one_loop(&self) -> bool {
        self.score_mod || self.listed
    }

    /// Whether blocks that need a mask branch to it, where there is one loop. Sums of the longest values leave no register for that.
    pub(super) const fn branches_to_mask(&self) -> bool {
        self.has_one_loop() && self.value < 256
    }

    /// Blocks of 16 keys whose random words are drawn while a consumer waits for its scores. A word is a register of the 240 that scores, sums and probabilities
    /// leave some of; where something makes scores, it takes those.
    pub(super) const fn drawn_ahead(&self) -> u32 {
        match (self.dropout, self.score_mod) {
            _ if self.consumers == 3 => 0,
            (true, false) if self.value <= 64 => self.block / 16,
            (true, false) if self.value <= 128 => 3,
            _ => 0,
        }
    }

    /// The same with a function of scores. What its steps are made of takes registers of those that scores are in; listed blocks divide those of the map.
    pub(super) fn with_function(self, function: Vec<Step<Source>>) -> Spec {
        let block = if self.listed { 64 } else { self.block - 16 };
        Spec { function, block, ..self }
    }

    /// Queries of a CTA.
    pub(super) const fn queries(&self) -> u32 {
        self.consumers * OWN_QUERIES
    }

    /// As queries, keys and values are mapped and multiplied.
    const fn operands(&self) -> (MapType, MatrixType) {
        if self.fp8 { (MapType::U8, MatrixType::E4m3) } else { (self.ty.map(), self.ty.matrix()) }
    }

    /// Elements that one `wgmma` multiplies for each result: its depth.
    pub(super) const fn step(&self) -> u32 {
        if self.fp8 { 32 } else { 16 }
    }

    /// The queries of one consumer.
    pub(super) const fn q_tile(&self) -> HeadTile {
        HeadTile { rows: OWN_QUERIES, elements: self.head, ty: self.operands().0 }
    }

    /// The outputs of one consumer.
    pub(super) const fn o_tile(&self) -> HeadTile {
        HeadTile { rows: OWN_QUERIES, elements: self.value, ty: self.ty.map() }
    }

    pub(super) const fn k_tile(&self) -> HeadTile {
        HeadTile { rows: self.block, elements: self.head, ty: self.operands().0 }
    }

    /// Values of a block of keys; of 8 bits its rows are elements, and keys lie along them, for such operands have no transposed form.
    pub(super) const fn v_tile(&self) -> HeadTile {
        let [rows, elements] = if self.fp8 { [self.value, self.block] } else { [self.block, self.value] };
        HeadTile { rows, elements, ty: self.operands().0 }
    }

    /// How far a descriptor of values moves for `steps` steps of keys.
    pub(super) const fn value_steps(&self, steps: u32) -> u32 {
        if self.fp8 { self.v_tile().along_steps(steps) } else { self.v_tile().across_steps(steps) }
    }

    /// The maps through which keys and values are copied.
    pub(super) fn k_map(&self) -> MapDecl {
        if self.paged { self.k_tile().open_map(Access::Read) } else { self.k_tile().map(Access::Read) }
    }

    pub(super) fn v_map(&self) -> MapDecl {
        if self.paged { self.v_tile().open_map(Access::Read) } else { self.v_tile().map(Access::Read) }
    }

    pub(super) fn o_map(&self) -> MapDecl {
        self.o_tile().map(Access::Write)
    }

    pub(super) fn score_shape(&self) -> WgmmaShape {
        wgmma_shape(self.block, self.operands().1, self.operands().1, MatrixType::F32)
    }

    pub(super) fn value_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.value, self.operands().1, self.operands().1, MatrixType::F32);
        WgmmaShape { a_in_registers: true, transpose_b: !self.fp8, ..shape }
    }

    /// Bytes through which outputs leave, where a CTA has room for them beside all else: then the queries of the next tile come while this one ends. 0 where they leave
    /// through the room of the queries, which has the size of outputs where both are of two bytes.
    pub(super) const fn output_bytes(&self) -> u32 {
        let held = self.consumers * self.q_tile().bytes() + self.stages * (self.k_tile().bytes() + self.v_tile().bytes());
        let outputs = self.consumers * self.o_tile().panels() * STAGE_BYTES;
        if self.fp8 || held + outputs <= MOST_BYTES { outputs } else { 0 }
    }

    /// The named barrier of the first consumer's turn, and of the first consumer's own; that of all consumers.
    pub(super) const fn barriers(&self) -> [u32; 3] {
        [FIRST_BARRIER, FIRST_BARRIER + self.consumers, FIRST_BARRIER + 2 * self.consumers]
    }

    /// Registers of a thread that loads, and of one that multiplies.
    pub(super) const fn registers(&self) -> [u32; 2] {
        if self.consumers == 3 { [32, 160] } else { [24, 240] }
    }

    pub(super) fn build(&self) -> KernelBody {
        let threads = WARPGROUP * (1 + self.consumers);
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 };
        build(header, |k| kernel::forward(k, self))
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}
