//! Sequences on the interpreter: that one of eight runs twice, and what only a second run, or a program behind another one, finds.

use std::collections::BTreeMap;

use verdigris_engines::arch::Arch;
use verdigris_engines::interpret::{Parts, Variant};
use verdigris_graph::{GraphBuilder, Uid, UnaryOp};
use verdigris_kir::face::{Header, build};
use verdigris_kir::interp::{Kernels, Options};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, Arg, Base, KernelRef, Launch, Program};
use verdigris_tensor::{DType, Layout};

const COUNT: usize = 32;
/// Bytes that one run stores: the result, and the word that is kept.
const STORED_BYTES: u64 = 4 * COUNT as u64 + 4;

/// What a planted program for `y = −x` does beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Planted {
    /// Counts itself in a constant, and sets the counter back.
    SetBack,
    /// Counts itself in a constant, and is right while that is 0.
    Counted,
    /// Uses its input as scratch.
    InputUsed,
}

/// `y = −x` by one part, with this program; the tensors are x and y.
fn planted(plant: Planted) -> (Variant, [Uid; 2]) {
    let layout = Layout::row_major(&[COUNT as u64]).expect("a small layout");
    let mut g = GraphBuilder::new("negated");
    let x = g.tensor("x", DType::F32, layout);
    let y = g.unary("negated", UnaryOp::Neg, x).expect("a function of x");
    g.store(y, "y", DType::F32).expect("a known tensor");
    let graph = g.finish().expect("a valid graph");
    let map = verdigris_engines::engine("map.simt").expect("registered");
    let mut variant = Parts::all(&graph, &Arch::virtual_device(2), &[map]).expect("is cut").variant(0);
    let bindings = &variant.partition.parts[0].bindings;
    let slot = |uid: Uid| Address::buffer(bindings.iter().position(|bound| *bound == uid).expect("bound"));
    let kernel = KernelRef::new("negated", move || {
        let header = Header { name: "negated".into(), target: Target::Sm80, threads: COUNT as u32, min_ctas: 1, cluster: 1 };
        build(header, |k| {
            let (x, y, kept) = (k.in_out("x", 4), k.output("y", 4), k.in_out("kept", 4));
            let own = x.at(k.thread(), 4);
            let value = k.ld_global::<f32>(own, 0);
            let seen = k.ld_global::<u32>(kept.address(), 0);
            k.bar_sync();
            let result = k.select(seen.eq(0u32), -value, value);
            k.st_global(y.at(k.thread(), 4), 0, result);
            match plant {
                Planted::SetBack => k.when(k.thread().eq(0u32), || k.st_global(kept.address(), 0, k.constant(0u32))),
                Planted::Counted => k.when(k.thread().eq(0u32), || k.st_global(kept.address(), 0, seen + 1)),
                Planted::InputUsed => k.st_global(own, 0, -value),
            }
        })
    });
    let mut program = Program { constants: vec![vec![0; 4]], buffer_alignment_bytes: vec![4; 2], ..Program::default() };
    let kept = Address { base: Base::Constant(0), offset_bytes: 0 };
    let args = [slot(x), slot(y), kept].map(Arg::Pointer).to_vec();
    program.launch(Launch::new(kernel, [1, 1, 1], args.into()));
    variant.configs[0].program = program;
    (variant, [x, y])
}

fn inputs([x, y]: [Uid; 2]) -> BTreeMap<Uid, Vec<u8>> {
    let numbers = (1..=COUNT).flat_map(|number| (number as f32).to_le_bytes()).collect();
    BTreeMap::from([(x, numbers), (y, vec![0xa5; 4 * COUNT])])
}

/// Whether y is −x.
fn is_right(buffers: &BTreeMap<Uid, Vec<u8>>, [_, y]: [Uid; 2]) -> bool {
    let numbers = buffers[&y].chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().expect("four bytes")));
    numbers.eq((1..=COUNT).map(|number| -(number as f32)))
}

/// Runs it under a seed: the bytes that it stored, and whether the result is right.
fn run(plant: Planted, seed: u64) -> (u64, bool) {
    let (variant, tensors) = planted(plant);
    let mut buffers = inputs(tensors);
    let counted = variant.interpret(&mut buffers, &BTreeMap::new(), &Kernels::new(), &Options::schedule(seed));
    (counted.unwrap_or_else(|findings| panic!("{findings}")).global_store_bytes, is_right(&buffers, tensors))
}

#[test]
fn one_seed_of_eight_runs_the_sequence_twice() {
    for seed in 0..24 {
        let times = if seed % 8 == 0 { 2 } else { 1 };
        assert_eq!(run(Planted::SetBack, seed), (times * STORED_BYTES, true), "seed {seed}");
    }
}

#[test]
fn what_is_right_the_first_time_alone_is_wrong_when_it_runs_twice() {
    for plant in [Planted::Counted, Planted::InputUsed] {
        for seed in 0..24 {
            assert_eq!(run(plant, seed).1, seed % 8 != 0, "{plant:?}, seed {seed}");
        }
    }
}

#[test]
fn a_program_that_uses_its_input_is_found_by_the_one_behind_it() {
    let right = planted(Planted::SetBack).0;
    for (front, is_found) in [(Planted::SetBack, false), (Planted::InputUsed, true)] {
        let (front, tensors) = planted(front);
        // Another program's constants are its own, so that the counter of one is not the other's.
        for seed in 1..8 {
            let options = Options::schedule(seed);
            let mut buffers = inputs(tensors);
            let alone = front.interpret(&mut buffers, &BTreeMap::new(), &Kernels::new(), &options);
            assert!(alone.is_ok() && is_right(&buffers, tensors), "alone it is right: {alone:?}");
            let mut buffers = inputs(tensors);
            let counted = right.interpret_behind(&front, &mut buffers, &BTreeMap::new(), &Kernels::new(), &options);
            let counted =
                counted.unwrap_or_else(|findings| panic!("{findings}")).expect("nothing is written that was read, says the graph");
            assert!(counted.global_store_bytes > STORED_BYTES);
            assert_eq!(is_right(&buffers, tensors), !is_found);
        }
    }
}
