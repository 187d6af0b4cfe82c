//! Attention with the products around it as one plan: which parts it is cut into, what they leave on the interpreter, beside the reference, and what a plan asks of a
//! cache; rows that are appended to tensors of any layout.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use verdigris::error::{BindingError, BindingRule};
use verdigris::recipe::{AttentionBlock, Function, Input, Recipe, draw};
use verdigris::{AttentionSpec, Binding, Causal, Config, Error, Handle, Mode, Pin, Policy, Precision};
use verdigris_cuda::{DeviceBuffer, fake};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_engines::interpret::Parts;
use verdigris_graph::pattern::partition;
use verdigris_graph::{BinaryOp, EpilogueStep, Graph, GraphBuilder, Problem, ReductionOp, Uid};
use verdigris_kir::interp::{Kernels, Options};
use verdigris_reference::compare::compare;
use verdigris_reference::data::{Distribution, graph_inputs, output_buffer};
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::judge::Trial;
use verdigris_reference::run::Inputs;
use verdigris_tensor::{DType, Layout};

/// A block with all that it may have.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    batch: u64,
    positions: u64,
    features: u64,
    heads: u64,
    kv_heads: u64,
    elements: u64,
    has_biases: bool,
    has_residual: bool,
    /// Elements of an angle: those of a head, or half of these.
    angles: Option<u64>,
    is_interleaved: bool,
    is_causal: bool,
    has_positions_first: bool,
    /// Positions that a cache has room for.
    room: Option<u64>,
    has_mask: bool,
}

/// Dims, the axis, rows, dims of lengths, the order in memory.
type Appended<'a> = (&'a [u64], usize, u64, &'a [u64], &'a [usize]);
/// What is done with a tensor, rows and lengths.
type Change<'a> = dyn Fn(&mut GraphBuilder, Uid, Uid, Uid) -> Result<(), verdigris_graph::Error> + 'a;

const PLAIN: Case = Case {
    dtype: DType::Bf16,
    batch: 2,
    positions: 5,
    features: 48,
    heads: 4,
    kv_heads: 2,
    elements: 16,
    has_biases: false,
    has_residual: false,
    angles: None,
    is_interleaved: false,
    is_causal: true,
    has_positions_first: false,
    room: None,
    has_mask: false,
};

const LENGTHS: usize = 10;

impl Case {
    fn given(&self) -> Vec<Option<Input>> {
        let tensor =
            |dtype: DType, dims: &[u64]| Some(Input { dtype, layout: Layout::row_major(dims).expect("small"), alignment_bytes: None });
        let own = |dims: &[u64]| tensor(self.dtype, dims);
        let lead = if self.has_positions_first { [self.positions, self.batch] } else { [self.batch, self.positions] };
        let all = (self.heads + 2 * self.kv_heads) * self.elements;
        let angle = self.angles.and_then(|elements| own(&[1, self.positions, elements]));
        // Heads before positions in memory, as caches of others have them.
        let cache = self.room.map(|room| {
            let head = room * self.elements;
            let strides = [self.kv_heads * head, self.elements, head, 1];
            let layout = Layout::new(&[self.batch, room, self.kv_heads, self.elements], &strides).expect("small");
            Input { dtype: self.dtype, layout, alignment_bytes: None }
        });
        vec![
            own(&[lead[0], lead[1], self.features]),
            own(&[all, self.features]),
            own(&[all]).filter(|_| self.has_biases),
            own(&[self.features, self.heads * self.elements]),
            own(&[self.features]).filter(|_| self.has_biases),
            own(&[lead[0], lead[1], self.features]).filter(|_| self.has_residual),
            angle,
            angle,
            cache,
            cache,
            self.room.and_then(|_| tensor(DType::I32, &[self.batch])),
            tensor(DType::U8, &[self.positions, self.room.unwrap_or(self.positions)]).filter(|_| self.has_mask),
        ]
    }

    fn block(&self) -> AttentionBlock {
        let causal = if self.is_causal { Causal::BottomRight } else { Causal::None };
        let spec = AttentionSpec { causal, ..AttentionSpec::new((self.elements as f64).powf(-0.5)) };
        let precision = if self.dtype == DType::F64 { Precision::F64 } else { Precision::Fp32 };
        let &Case { heads, kv_heads, is_interleaved, has_positions_first, .. } = self;
        AttentionBlock { precision, spec, heads, kv_heads, is_interleaved, has_positions_first }
    }

    fn recipe(&self) -> Recipe {
        draw(&Function::AttentionBlock(self.block()), &self.given()).unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    fn kinds(&self) -> Vec<&'static str> {
        partition(&self.recipe().graph).expect("cut").parts.iter().map(|part| part.problem.kind()).collect()
    }

    /// Inputs, with lengths that leave room, fill it, go beyond it and lie below the new rows.
    fn inputs(&self, recipe: &Recipe, seed: u64) -> Inputs<Uid> {
        let mut inputs = graph_inputs(&recipe.graph, Distribution::Normal, seed);
        if let Some(room) = self.room {
            let (uid, _) = recipe.inputs.iter().find(|(_, place)| *place == LENGTHS).expect("lengths");
            let some = [self.positions + 3, room, room + 2, self.positions.saturating_sub(2), self.positions];
            let lengths = (0..self.batch).map(|i| some[((i + seed) % 5) as usize] as i32);
            inputs.buffers.insert(*uid, lengths.flat_map(i32::to_le_bytes).collect());
        }
        inputs
    }
}

#[test]
fn a_block_is_two_products_and_attention_without_copies() {
    for dtype in [DType::Bf16, DType::F16, DType::F32, DType::F64] {
        for has_positions_first in [false, true] {
            let plain = Case { dtype, has_positions_first, ..PLAIN };
            for has_more in [false, true] {
                let case = Case { has_biases: has_more, has_residual: has_more, has_mask: has_more, ..plain };
                assert_eq!(case.kinds(), ["gemm", "attention", "gemm"], "{case:?}");
            }
            // Queries and keys are turned by one pass.
            for (angles, is_interleaved) in [(16, false), (8, false), (16, true), (8, true)] {
                let case = Case { angles: Some(angles), is_interleaved, ..plain };
                assert_eq!(case.kinds(), ["gemm", "map", "attention", "gemm"], "{case:?}");
            }
        }
        for batch in [1, 3] {
            // One pass stores keys and values, and turns the keys on the way.
            let cached = Case { dtype, batch, room: Some(40), ..PLAIN };
            assert_eq!(cached.kinds(), ["gemm", "map", "attention", "gemm"], "{cached:?}");
            let turned = Case { angles: Some(16), ..cached };
            assert_eq!(turned.kinds(), ["gemm", "map", "map", "attention", "gemm"], "{turned:?}");
            // As many heads of queries are turned along with the keys.
            let alike = Case { kv_heads: 4, ..turned };
            assert_eq!(alike.kinds(), ["gemm", "map", "attention", "gemm"], "{alike:?}");
        }
    }
}

#[test]
fn biases_and_the_residual_are_steps_of_the_products() {
    let graph = Case { has_biases: true, has_residual: true, ..PLAIN }.recipe().graph;
    let cut = partition(&graph).expect("cut");
    let binaries = |number: usize| match &cut.parts[number].problem {
        Problem::Gemm(gemm) => gemm.epilogue.iter().filter(|step| matches!(step, EpilogueStep::Binary { .. })).count(),
        other => panic!("{} is no product", other.kind()),
    };
    assert_eq!([binaries(0), binaries(2)], [1, 2]);
    // What the first product gives, and what attention does.
    assert_eq!(cut.temporaries.len(), 2);
    let Problem::Attention(attention) = &cut.parts[1].problem else { panic!("no attention") };
    assert_eq!([&attention.q, &attention.k, &attention.v].map(|view| view.slot.0), [0; 3], "views of one tensor");
    assert_eq!([attention.q.offset, attention.k.offset, attention.v.offset], [0, 64, 96]);
}

#[test]
fn tensor_cores_take_what_the_products_leave() {
    let taken_by = |case: Case, engine: &str| {
        let cut = partition(&case.recipe().graph).expect("cut");
        let attention = cut.parts.iter().find(|part| part.problem.kind() == "attention").expect("attention");
        let engine = verdigris_engines::engine(engine).expect("is there");
        engine.accept(&attention.problem, &Arch::h200()).unwrap_or_else(|refusal| panic!("{case:?}: {refusal}"));
    };
    for dtype in [DType::Bf16, DType::F16] {
        let large = Case { dtype, positions: 100, features: 512, heads: 8, elements: 64, ..PLAIN };
        for case in [large, Case { angles: Some(64), ..large }, Case { has_positions_first: true, ..large }] {
            taken_by(case, "attention.forward");
        }
        taken_by(Case { positions: 1, room: Some(512), angles: Some(64), ..large }, "attention.decode");
    }
}

/// Every part by each engine's ways in turn, beside the reference.
fn is_right(case: Case, seed: u64) {
    let recipe = case.recipe();
    let inputs = case.inputs(&recipe, seed);
    let expected = evaluate(&recipe.graph, &inputs, Selection::All).expect("evaluates");
    let mut before: BTreeMap<Uid, Vec<u8>> = expected.iter().map(|output| (output.id, output_buffer(output, &inputs))).collect();
    for (output, input) in recipe.graph.in_place() {
        let held = &inputs.buffers[&input];
        before.get_mut(&output).expect("stored")[..held.len()].copy_from_slice(held);
    }
    let engines: Vec<_> = verdigris_engines::engines().collect();
    let arch = Arch::virtual_device(2);
    let parts = Parts::new(&recipe.graph, &arch, &engines, seed as usize).expect("is cut");
    assert!(parts.variants() > 0, "{case:?}: somebody takes every part");
    let mut buffers: BTreeMap<Uid, Vec<u8>> = inputs.buffers.clone();
    buffers.extend(before.clone());
    let number = seed as usize % parts.variants();
    let options = Options { sms: arch.sm_count, ..Options::schedule(seed) };
    parts
        .interpret(number, &mut buffers, &inputs.scalars, &Kernels::new(), &options)
        .unwrap_or_else(|findings| panic!("{case:?}: {findings}"));
    for output in &expected {
        let report = compare(output, &before[&output.id], &buffers[&output.id]);
        assert!(report.passes(), "{case:?}, seed {seed}, {}: {report}", output.id);
    }
}

#[test]
fn blocks_on_the_interpreter_are_the_reference() {
    for (number, dtype) in [DType::Bf16, DType::F16, DType::F32].into_iter().enumerate() {
        let seed = number as u64;
        let all = Case { dtype, has_biases: true, has_residual: true, ..PLAIN };
        is_right(all, seed);
        is_right(Case { is_causal: false, has_mask: true, has_positions_first: true, ..all }, seed + 1);
        is_right(Case { dtype, kv_heads: 4, positions: 7, angles: Some(8), ..PLAIN }, seed + 2);
        is_right(Case { positions: 3, angles: Some(16), is_interleaved: true, ..all }, seed + 3);
        is_right(
            Case { dtype, heads: 3, kv_heads: 1, angles: Some(8), is_interleaved: true, has_positions_first: true, ..PLAIN },
            seed + 4,
        );
    }
}

#[test]
fn blocks_with_a_cache_on_the_interpreter_are_the_reference() {
    for (number, dtype) in [DType::Bf16, DType::F16, DType::F32].into_iter().enumerate() {
        let seed = number as u64;
        let step = Case { dtype, batch: 5, positions: 1, room: Some(19), ..PLAIN };
        is_right(step, seed);
        is_right(Case { angles: Some(16), has_biases: true, has_residual: true, ..step }, seed + 1);
        is_right(Case { angles: Some(8), is_interleaved: true, kv_heads: 4, ..step }, seed + 2);
        is_right(Case { positions: 4, angles: Some(8), batch: 1, ..step }, seed + 3);
        is_right(Case { positions: 3, is_causal: false, has_mask: true, ..step }, seed + 4);
    }
}

#[test]
fn rows_are_appended_to_tensors_of_any_layout() {
    let engines: Vec<_> = verdigris_engines::engines().collect();
    let arch = Arch::virtual_device(2);
    let mut wide = 0;
    let cases: &[Appended<'_>] = &[
        (&[2, 9, 3, 16], 1, 2, &[2, 1, 1, 1], &[0, 1, 2, 3]),
        (&[2, 9, 3, 16], 1, 1, &[2, 1, 1, 1], &[0, 2, 1, 3]),
        (&[2, 3, 9, 8], 2, 4, &[1, 1, 1, 1], &[0, 1, 2, 3]),
        (&[4, 24], 1, 8, &[4, 1], &[0, 1]),
        (&[24, 4], 0, 3, &[1, 4], &[0, 1]),
        (&[24, 4], 0, 5, &[1, 4], &[1, 0]),
        (&[7], 0, 3, &[1], &[0]),
        (&[3, 5, 4], 0, 9, &[1, 1, 1], &[2, 1, 0]),
    ];
    for (number, &(dims, axis, rows, of_lengths, order)) in cases.iter().enumerate() {
        for (nth, dtype) in [DType::Bf16, DType::F32, DType::F64, DType::I8, DType::I64].into_iter().enumerate() {
            let mut g = GraphBuilder::new("append");
            let x = g.tensor("x", dtype, Layout::with_order(dims, order).expect("small"));
            let mut own = dims.to_vec();
            own[axis] = rows;
            let new = g.tensor("new", dtype, Layout::row_major(&own).expect("small"));
            let lengths = g.tensor("lengths", DType::I32, Layout::row_major(of_lengths).expect("small"));
            g.append("append", x, new, lengths, axis as u32).expect("fits");
            let graph = g.finish().expect("valid");
            let parts = Parts::all(&graph, &arch, &engines).expect("is cut");
            for variant in 0..parts.variants() {
                let seed = (10 * number + nth + 100 * variant) as u64;
                let trial = Trial::new(&graph, Distribution::Normal, seed, Selection::All).expect("evaluates");
                let mut buffers = trial.inputs.buffers.clone();
                buffers.extend(trial.outputs().clone());
                let options = Options { sms: arch.sm_count, ..Options::schedule(seed) };
                parts
                    .interpret(variant, &mut buffers, &trial.inputs.scalars, &Kernels::new(), &options)
                    .unwrap_or_else(|findings| panic!("{dims:?} along {axis}, {dtype}: {findings}"));
                trial.judge(&buffers).unwrap_or_else(|what| panic!("{dims:?} along {axis}, {dtype}, seed {seed}: {what}"));
                wide += usize::from(parts.chosen(variant).any(|config| config.knobs.to_string().contains("vector=8")));
            }
        }
    }
    assert!(wide > 0, "some rows are stored sixteen bytes at a time");
}

#[test]
fn where_rows_go_is_checked() {
    let make = |change: &Change<'_>| {
        let mut g = GraphBuilder::new("append");
        let tensor = |g: &mut GraphBuilder, name: &str, dtype, dims: &[u64]| g.tensor(name, dtype, Layout::row_major(dims).expect("small"));
        let x = tensor(&mut g, "x", DType::F32, &[2, 9, 4]);
        let rows = tensor(&mut g, "rows", DType::F32, &[2, 3, 4]);
        let lengths = tensor(&mut g, "lengths", DType::I32, &[2, 1, 1]);
        change(&mut g, x, rows, lengths).and_then(|()| g.finish().map(drop)).map_err(|error| error.to_string())
    };
    assert_eq!(make(&|g, x, rows, lengths| g.append("a", x, rows, lengths, 1).map(drop)), Ok(()));
    let said = |change: &Change<'_>, words: &str| {
        let error = make(change).expect_err("is refused");
        assert!(error.contains(words), "{error}");
    };
    said(&|g, x, rows, lengths| g.append("a", x, rows, lengths, 3).map(drop), "an axis is below the number of dims");
    said(&|g, x, rows, lengths| g.append("a", x, rows, lengths, 0).map(drop), "rows have the dims");
    said(&|g, x, rows, _| g.append("a", x, rows, rows, 1).map(drop), "lengths are i32");
    said(
        &|g, x, rows, lengths| {
            g.append("a", x, rows, lengths, 1)?;
            let y = g.unary("late", verdigris_graph::UnaryOp::Relu, x)?;
            g.store(y, "y", DType::F32)
        },
        "no other op reads what rows are appended to",
    );
    said(
        &|g, x, rows, lengths| {
            let y = g.unary("made", verdigris_graph::UnaryOp::Relu, x)?;
            g.append("a", y, rows, lengths, 1).map(drop)
        },
        "is stored",
    );
    said(
        &|g, x, rows, lengths| {
            let y = g.append("a", x, rows, lengths, 1)?;
            g.set_layout(y, Layout::with_order(&[2, 9, 4], &[1, 0, 2]).expect("small"))
        },
        "with the same strides",
    );
}

fn handle() -> Handle {
    Handle::on(&fake::context(), &Config::default()).expect("the fake is always there")
}

#[test]
fn a_step_with_a_cache_is_one_plan_that_asks_for_the_caches_own_memory() {
    let handle = handle();
    let case = Case { batch: 2, positions: 1, angles: Some(16), room: Some(64), has_residual: true, ..PLAIN };
    let recipe = case.recipe();
    let plan = handle.plan_graph(&recipe.graph, &Policy::default()).expect("is planned");
    assert_eq!(plan.parts().count(), 5);
    assert!(plan.workspace_bytes() > 0, "temporaries lie in the workspace");
    let explained = plan.explain().to_string();
    assert!(explained.contains("attention.") && explained.contains("gemm."), "{explained}");
    let memory: Vec<(Uid, DeviceBuffer)> =
        plan.tensors().iter().map(|tensor| (tensor.uid, handle.pool().alloc(handle.stream(), tensor.bytes).expect("allocates"))).collect();
    let in_place = recipe.graph.in_place();
    assert_eq!(in_place.len(), 2, "keys and values");
    let bound = |apart: bool| -> Vec<(Uid, Binding<'_>)> {
        let of = |uid: Uid| {
            let lies_in = in_place.iter().find(|(output, _)| !apart && *output == uid).map_or(uid, |(_, input)| *input);
            let (_, buffer) = memory.iter().find(|(other, _)| *other == lies_in).expect("is bound");
            (uid, Binding::Buffer(buffer.slice()))
        };
        plan.tensors().iter().map(|tensor| of(tensor.uid)).collect()
    };
    let before = fake::launch_count();
    plan.execute_from(handle.stream(), &bound(false), handle.pool()).expect("runs");
    assert!(fake::launch_count() >= before + 5);
    match plan.execute_from(handle.stream(), &bound(true), handle.pool()) {
        Err(Error::Binding(BindingError { name, wanted, rule: BindingRule::InPlace, .. })) => {
            assert!(name.contains("k_cache") && wanted.contains("k_cache"), "{name}: {wanted}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_attention_of_a_block_can_be_pinned() {
    let handle = handle();
    let recipe = Case { positions: 64, elements: 64, features: 256, ..PLAIN }.recipe();
    let plan = handle.plan_graph(&recipe.graph, &Policy::default()).expect("is planned");
    assert_eq!(plan.parts().count(), 3);
    // Another engine than the one that is chosen.
    assert_ne!(plan.parts().nth(1).map(|part| part.engine().name), Some("attention.simt"));
    let pin = Pin { part: Some(1), engine: "attention.simt".to_owned(), knobs: Knobs::default() };
    let pinned = handle.plan_graph(&recipe.graph, &Policy { mode: Mode::Pinned(vec![pin]), ..Policy::default() }).expect("is planned");
    assert_eq!(pinned.parts().nth(1).map(|part| part.engine().name), Some("attention.simt"));
}

/// The sum of what a graph writes times weights, and its gradients.
fn with_gradients(case: Case) -> (Graph, Uid, Vec<(Uid, Uid)>) {
    let recipe = case.recipe();
    let y = recipe.results[0].uid;
    let mut g = GraphBuilder::from(recipe.graph);
    let dims = g.dims(y).expect("there");
    let weights = g.tensor("weights", case.dtype, Layout::row_major(&dims).expect("small"));
    let terms = g.binary("terms", BinaryOp::Mul, y, weights).expect("fits");
    let axes: Vec<u32> = (0..dims.len() as u32).collect();
    let loss = g.reduction("loss", ReductionOp::Add, terms, &axes).expect("fits");
    g.store(loss, "loss", case.dtype).expect("stores");
    let mut graph = g.finish().expect("valid");
    let of: Vec<Uid> = recipe.inputs.iter().filter(|(_, place)| *place < 6).map(|(uid, _)| *uid).collect();
    let gradients = graph.gradient(loss, &of).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    (graph, loss, of.into_iter().zip(gradients).collect())
}

#[test]
fn gradients_go_through_a_block() {
    let base = Case { dtype: DType::F64, has_biases: true, has_residual: true, positions: 3, features: 6, elements: 4, ..PLAIN };
    for case in [base, Case { angles: Some(4), ..base }, Case { angles: Some(2), is_interleaved: true, has_positions_first: true, ..base }]
    {
        let (graph, loss, gradients) = with_gradients(case);
        let inputs = graph_inputs(&graph, Distribution::Uniform, 7);
        let all = |inputs: &Inputs<Uid>| -> BTreeMap<Uid, Vec<f64>> {
            let expected = evaluate(&graph, inputs, Selection::All).expect("evaluates");
            expected.into_iter().map(|output| (output.id, output.values.iter().map(|element| element.value).collect())).collect()
        };
        let found = all(&inputs);
        assert_eq!(gradients.len(), 6);
        for (x, dx) in gradients {
            let count = inputs.buffers[&x].len() / 8;
            // Where the elements lie, in the order of their indices.
            let layout = graph.tensor(x).expect("there").layout;
            let place = |number: usize| {
                let (mut rest, mut place) = (number as u64, 0);
                for (dim, stride) in layout.dims().iter().zip(layout.strides()).rev() {
                    place += rest % dim * stride;
                    rest /= dim;
                }
                8 * place as usize
            };
            let step = |by: f64| {
                let mut moved = inputs.clone();
                let bytes = moved.buffers.get_mut(&x).expect("there");
                for i in 0..count {
                    let eight = &mut bytes[place(i)..place(i) + 8];
                    let value = f64::from_le_bytes((&*eight).try_into().expect("eight")) + by * ((i * 7 % 11) as f64 - 5.0);
                    eight.copy_from_slice(&value.to_le_bytes());
                }
                all(&moved)[&loss][0]
            };
            let told = (step(1e-5) - step(-1e-5)) / 2e-5;
            let summed: f64 = (0..count).map(|i| found[&dx][i] * ((i * 7 % 11) as f64 - 5.0)).sum();
            assert!((told - summed).abs() <= 1e-6 * (1.0 + told.abs()), "{case:?}, {x}: {summed}, by differences {told}");
        }
    }
}

#[test]
fn what_does_not_fit_a_block_is_told() {
    let told = |case: Case, change: &dyn Fn(&mut Vec<Option<Input>>)| {
        let mut given = case.given();
        change(&mut given);
        draw(&Function::AttentionBlock(case.block()), &given).expect_err("is refused").to_string()
    };
    let dims = |dtype: DType, dims: &[u64]| Some(Input { dtype, layout: Layout::row_major(dims).expect("small"), alignment_bytes: None });
    let cached = Case { room: Some(8), angles: Some(16), ..PLAIN };
    let said = |error: String, words: &str| assert!(error.contains(words), "{error}");
    said(told(PLAIN, &|given| given[0] = dims(DType::Bf16, &[10, 48])), "it is [batch, positions, elements]");
    said(told(PLAIN, &|given| given[1] = dims(DType::Bf16, &[129, 48])), "129 outputs for 4 heads of queries and 2 of keys");
    said(told(PLAIN, &|given| given[3] = dims(DType::Bf16, &[48, 63])), "a weight of dims [48, 63] for 64 values");
    said(told(PLAIN, &|given| given[5] = dims(DType::Bf16, &[2, 5, 47])), "a residual of dims [2, 5, 47]");
    said(told(cached, &|given| given[7] = dims(DType::Bf16, &[1, 5, 12])), "angles of dims [1, 5, 12]");
    said(told(cached, &|given| given[7] = None), "tensor 7 of the call is missing");
    said(told(cached, &|given| given[9] = dims(DType::F16, &[2, 8, 2, 16])), "of the type of the input");
    said(told(cached, &|given| given[10] = None), "a cache without lengths");
    said(told(cached, &|given| given[10] = dims(DType::I64, &[2])), "they are i32, one for each batch");
    said(told(Case { room: Some(4), ..cached }, &|_| ()), "5 new positions for a cache of 4");
    said(told(Case { has_positions_first: true, ..cached }, &|_| ()), "with a cache the batch is the first dim");
    said(told(Case { elements: 15, angles: Some(15), ..PLAIN }, &|_| ()), "heads of 15 elements");
}
