//! A recurrent layer over a whole sequence: `h_t = tanh(R·h_{t−1} + x_t)`, with R in registers from the first step to the last.
//!
//! Each CTA owns 64 units: its rows of R are the constant A fragments of a register `wgmma`, loaded once. The state of all units comes
//! through TMA at every step as B, and the CTA's own units of the next state leave by ordinary stores. Between steps stands a
//! barrier of the whole grid: stores, each writer's proxy fence, release; acquire, proxy fence, tensor load.
//!
//! Source: Pöppel et al., "FlashRNN", 2024, for the idea of caching R; Diamos et al., "Persistent RNNs", 2016.

use super::{Allowances, Probe};
use verdigris_kir::face::{Header, Kernel, LoadOptions, Val, WgmmaA, build as build_kernel};
use verdigris_kir::inst::{Cache, Fence, MatrixType, Packed, WgmmaShape};
use verdigris_kir::ir::{KernelBody, MapType, Target};
use verdigris_kir::tile::deep::DeepTile;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::grid_barrier::GridBarrier;
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::ring::publish_barriers;

/// Units of a CTA: the rows of one `wgmma`.
pub const UNITS: u32 = 64;

/// What shapes the kernel.
///
/// Parameters: map `h` of rank 3 over the states, `{units, batch, steps + 1}` bf16, of which the first is given; `states`, the same memory;
/// `x` f32 `[steps][batch][units]`; `r` bf16 `[units][units]`, row by row; `steps`; `arrivals`, a zeroed `u32`. The grid is `[units / 64,
/// 1, 1]`, resident as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Units of the layer: a multiple of 64.
    pub units: u32,
    /// Sequences: a multiple of 8.
    pub batch: u32,
}

impl Spec {
    /// 160 registers of weights a thread.
    pub const FULL: Spec = Spec { units: 640, batch: 32 };

    /// The state: sequences are the columns of the product, units its depth.
    pub fn state_tile(&self) -> DeepTile {
        DeepTile::new(OperandTile { rows: self.batch, ty: MapType::Bf16, major: Major::Depth }, self.units)
    }

    fn shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.batch, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32);
        WgmmaShape { a_in_registers: true, ..shape }
    }

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let name = format!("probe_recurrent_step_h{}_b{}", self.units, self.batch);
        build_kernel(Header { name, target: Target::Sm90a, threads: 128, min_ctas: 1, cluster: 1 }, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "recurrent_step",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 1 },
        what_it_shows: "A fragments that stay in registers for the kernel's life; a grid barrier from relaxed loads, release and acquire; \
                        ordinary global writes handed to TMA; movmatrix",
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let tile = spec.state_tile();
    let h_map = k.tensor_map("h", tile.tile.map(spec.batch));
    let states = k.in_out("states", 16);
    let x = k.input("x", 4);
    let r = k.input("r", 4);
    let steps = k.scalar::<u32>("steps");
    let barrier = GridBarrier::declare(k, "arrivals");
    let slot = k.shared("state", tile.bytes(), 1024);
    let full = k.mbarrier_array("state full", 1);
    full.arrivals().set(1);

    let thread = k.thread();
    let lane = k.lane();
    let leader = thread.eq(0);
    k.when(leader, || full.init());
    publish_barriers(k);

    // This thread's share of R: of each 16 columns two pairs in each of two rows.
    let first_unit = k.cta() * UNITS;
    let row = first_unit + Fragment::<f32>::row(thread);
    let weights: Vec<[Val<'k, u32>; 4]> = (0..spec.units / 16)
        .map(|step| {
            [(0, 0), (0, 8), (1, 0), (1, 8)].map(|(block, down)| {
                let element = (row + down) * spec.units + Fragment::<f32>::column(thread);
                k.ld_global_with::<u32>(
                    r.at(element, 2),
                    i64::from((16 * step + 8 * block) * 2),
                    verdigris_kir::inst::Order::Weak,
                    Cache::NonCoherent,
                )
            })
        })
        .collect();
    let sums = Fragment::<f32>::unset(k, spec.batch);
    let low = tile.tile.descriptor_base(slot.address(), 0u32);

    k.range(steps, |t| {
        // The step's own inputs do not wait for the others.
        let inputs: Vec<Val<'k, f32>> = (0..spec.batch / 2)
            .map(|register| {
                let (half, column) = (register / 2 % 2, register / 4 * 8 + register % 2);
                let sequence = Fragment::<f32>::column(thread) + column;
                let element = (t * spec.batch + sequence) * spec.units + (row + 8 * half);
                k.ld_global_with::<f32>(x.at(element, 4), 0, verdigris_kir::inst::Order::Weak, Cache::NonCoherent)
            })
            .collect();

        k.when(leader, || {
            barrier.wait(t);
            // Other CTAs wrote the state by ordinary stores; TMA reads it.
            k.fence(Fence::ProxyAsync);
            let arrived = full.at(0u32);
            arrived.arrive_expect_tx(tile.bytes());
            tile.load(slot.address(), &h_map, 0u32, 0u32, t, arrived, LoadOptions::default());
        });
        full.at(0u32).wait(t & 1);

        k.wgmma_fence();
        for (step, a) in weights.iter().enumerate() {
            let b = tile.tile.descriptor_from(low + tile.advance(0, step as u32));
            k.wgmma(spec.shape(), sums.registers(), WgmmaA::Registers(a), b, step > 0);
        }
        k.wgmma_commit();
        k.wgmma_wait(0);

        for (register, input) in sums.registers().iter().zip(inputs) {
            register.set((*register + input).tanh());
        }
        // A pair of sequences of one unit becomes, transposed, a pair of units of one sequence: neighbours in memory.
        for block in 0..spec.batch / 8 {
            let sequence = (lane >> 2) + 8 * block;
            for half in 0..2 {
                let pair: Val<'k, u32> = k.pack(Packed::Bf16x2, sums.element(block, half, 0), sums.element(block, half, 1));
                let units = k.movmatrix(pair);
                let unit = first_unit + ((thread >> 5) << 4) + (8 * half) + ((lane & 3) << 1);
                let element = ((t + 1) * spec.batch + sequence) * spec.units + unit;
                k.st_global(states.at(element, 2), 0, units);
            }
        }
        k.fence(Fence::ProxyAsync);
        k.bar_sync();
        k.when(leader, || barrier.arrive());
    });
}
