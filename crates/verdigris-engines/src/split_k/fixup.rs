//! The fixup of stream-K and split-K, within the kernel: adds up the parts of a sum that several CTAs formed; warpgroups whose accumulators
//! hold one tile over different parts of its depth.
//!
//! Each part goes to scratch, and whoever comes last adds them up in order, so that the sum does not depend on who that is.
//!
//! **What.** `sum[row, column] = Σ part[row, column]` over the parts of one *owner* (a tile, and a warpgroup in it), in the order of the
//! parts; of two parts, in either order, which is the same.
//! **Cost.** Every part but one is written to global memory once and read once; 4 bytes an element. One counter for each owner, zeroed
//! before the launch.
//! **Source.** Osama et al., "Stream-K", PPoPP 2023, with a fixed order of addition.

use std::panic::Location;

use verdigris_kir::face::{Kernel, SharedPiece, Val};
use verdigris_kir::inst::{Atomic, Cache, Fence, Order, Scope};
use verdigris_kir::params::ReadWrite;
use verdigris_kir::program::{Address, Program, Step};
use verdigris_kir::tile::fragment::Fragment;

use crate::store::Sum;

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

verdigris_kir::parameters! {
    /// The scratch and the counters of a kernel with a fixup.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct FixupValues / #[derive(Clone, Copy, Debug)] FixupArgs of () as _spec {
        parts: ReadWrite = 16,
        counters: ReadWrite = 4,
        most_parts: u32,
    }
}

/// The fixup of a kernel's warpgroups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fixup<'k> {
    kernel: Kernel<'k>,
    values: FixupValues<'k>,
    told: SharedPiece<'k>,
    barrier: u32,
}

/// One warpgroup's part of a sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'k> {
    /// Which sum: counts the tiles that may be split, and the warpgroups that form each.
    pub(crate) owner: Val<'k, u32>,
    /// Which part of it, and of how many; 1 where the sum is not split.
    pub(crate) part: Val<'k, u32>,
    pub(crate) parts: Val<'k, u32>,
    /// The warpgroup, counted among those of the CTA that take part, and the thread in it.
    pub(crate) warpgroup: Val<'k, u32>,
    pub(crate) thread: Val<'k, u32>,
}

impl FixupArgs {
    /// Adds to a program what a kernel with a fixup needs, ahead of its launch: scratch for the `words` f32 or s32 words of each of at most
    /// `most_parts` parts of `owners` sums, and zeroed counters.
    pub(crate) fn with_scratch(program: &mut Program, owners: u64, most_parts: u32, words: u64) -> FixupArgs {
        let parts = program.add_scratch("parts", owners * u64::from(most_parts) * words * 4);
        let counters = program.add_scratch("counters", owners * 4);
        program.steps.push(Step::Fill { at: counters, bytes: owners * 4, value: 0 });
        FixupArgs { parts, counters, most_parts }
    }

    /// For a launch that splits nothing, so that one kernel serves both: `unused` is any address that is a multiple of 16 bytes, and
    /// nothing is accessed there.
    pub(crate) fn without_scratch(unused: Address) -> FixupArgs {
        FixupArgs { parts: unused, counters: unused, most_parts: 1 }
    }
}

impl<'k> Fixup<'k> {
    /// Declares the shared memory. Warpgroup `w` of the `warpgroups` that take part uses named barrier `barrier + w`.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, values: FixupValues<'k>, warpgroups: u32, barrier: u32) -> Self {
        Fixup { kernel: k, values, told: k.shared("arrivals seen", 4 * warpgroups, 4), barrier }
    }

    /// Whether this warpgroup goes on to write the tile; its registers then hold the whole sum. All threads of the warpgroup call it.
    #[track_caller]
    pub(crate) fn is_last<T: Sum>(&self, sums: &[Fragment<'k, T>], of: Part<'k>) -> Val<'k, bool> {
        self.kernel.scope(Location::caller(), || {
            let k = self.kernel;
            // Parts of one owner stand side by side; a thread's own four words are one vector.
            let words: u32 = sums.iter().map(|sum| 64 * sum.columns()).sum();
            let place = |part: Val<'k, u32>| {
                let bytes = (of.owner * self.values.most_parts + part).mul_wide(words * 4);
                self.values.parts.moved(bytes).at(of.thread, 16)
            };
            let vectors = sums.iter().flat_map(|sum| sum.registers().chunks(4)).enumerate();
            let offset = |i: usize| i as i64 * 16 * i64::from(WARPGROUP);
            let keep = |part: Val<'k, u32>| {
                let own = place(part);
                for (i, registers) in vectors.clone() {
                    let values: Vec<Val<'k, T>> = registers.iter().map(|r| r.get()).collect();
                    k.st_global_vector(own, offset(i), &values, Cache::Default);
                }
                k.fence(Fence::AcqRel(Scope::Gpu));
            };
            let add = |part: Val<'k, u32>| {
                let from = place(part);
                for (i, registers) in vectors.clone() {
                    let values = k.ld_global_vector::<T>(from, offset(i), 4, Cache::Default);
                    registers.iter().zip(values).for_each(|(register, value)| register.set(*register + value));
                }
            };
            let barrier = of.warpgroup + self.barrier;
            let told = self.told.address() + of.warpgroup * 4;
            let counter = self.values.counters.at(of.owner, 4);
            // Adds to the counter once the whole warpgroup is here; everyone learns what it was.
            let count = |amount: u32| {
                k.barrier_sync(barrier, WARPGROUP);
                k.when(of.thread.eq(0), || {
                    let seen = k.atom_global(Atomic::Add, counter, 0, amount, Order::AcqRel(Scope::Gpu));
                    k.st_shared(told, 0, seen);
                });
                k.barrier_sync(barrier, WARPGROUP);
                k.ld_shared::<u32>(told, 0)
            };

            let last = k.var_named("last", of.parts.eq(1));
            k.when(of.parts.eq(2), || {
                // Two parts add up to the same in either order: the later one keeps its own in registers and waits for the other's.
                k.when_else(
                    count(1).eq(0),
                    || {
                        keep(k.constant(0));
                        count(2);
                    },
                    || {
                        k.when(of.thread.eq(0), || {
                            k.repeat_until(|| k.ld_global_with::<u32>(counter, 0, Order::Acquire(Scope::Gpu), Cache::Default).ge(4));
                        });
                        k.barrier_sync(barrier, WARPGROUP);
                        k.fence(Fence::AcqRel(Scope::Gpu));
                        add(k.constant(0));
                        last.set(k.thread().ge(0u32));
                    },
                );
            });
            k.when(of.parts.gt(2), || {
                keep(of.part);
                last.set((count(1) + 1).eq(of.parts));
                k.when(last, || {
                    k.fence(Fence::AcqRel(Scope::Gpu));
                    for sum in sums {
                        sum.registers().iter().for_each(|register| register.set(k.constant(T::ZERO)));
                    }
                    k.range(of.parts, add);
                });
            });
            // The word is used again by the next split tile.
            k.when(of.parts.gt(1), || k.barrier_sync(barrier, WARPGROUP));
            last.get()
        })
    }
}
