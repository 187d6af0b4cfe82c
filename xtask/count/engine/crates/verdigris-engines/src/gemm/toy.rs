//! `gemm.toy`: `D = A · B` of packed f32 matrices, each element by a thread of its own. The least that an engine is.

use verdigris_graph::{GemmProblem, Problem};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};

const NAME: &str = "gemm_toy";
const THREADS: u32 = 256;

/// An accepted product.
#[derive(Debug)]
pub(super) struct Toy {
    problem: GemmProblem,
}

impl Algorithm for Toy {
    const ID: EngineId = EngineId { name: "gemm.toy", number: 199 };
    const VERSION: u32 = 1;
    type Config = ();

    fn accept(problem: &Problem, _: &Arch) -> Result<Self, Refusal> {
        let problem = super::product(Self::ID, problem)?.clone();
        let plain = GemmProblem::packed(problem.m, problem.n, problem.k, DType::F32, DType::F32);
        Self::ID.require(plain.is_ok_and(|plain| plain == problem), Reason::Layout, "taken is D = A · B of packed f32 matrices")?;
        let largest = (problem.m * problem.n).max(problem.m * problem.k).max(problem.k * problem.n);
        Self::ID.require(largest < 1 << 31, Reason::Extent, format_args!("{largest} elements, taken below 2^31"))?;
        Ok(Toy { problem })
    }

    fn configs(&self) -> Vec<()> {
        vec![()]
    }

    fn knobs((): &()) -> Knobs {
        Knobs::default()
    }

    fn notes(&self, (): &()) -> Notes {
        Notes::of(DType::F32)
    }

    fn work(&self, (): &()) -> Work {
        let GemmProblem { m, n, k, .. } = self.problem;
        Work::default().beside([Stream::new(Traffic::Lines, 8.0 * m as f64 * n as f64 * k as f64)])
    }

    fn lower(&self, (): &()) -> Result<Program, Refusal> {
        let GemmProblem { m, n, k, .. } = self.problem;
        let mut program = empty_program(&self.problem.slots());
        let elements = (m * n) as u32;
        if elements > 0 {
            let args = ParamsArgs {
                elements,
                columns: n as u32,
                width: n as u32,
                depth: k as u32,
                a: Address::buffer(0),
                b: Address::buffer(1),
                d: Address::buffer(2),
            };
            program.launch(Launch::new(KernelRef::new(NAME, kernel), [elements.div_ceil(THREADS), 1, 1], args.bound(&())));
        }
        Ok(program)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        vec![KernelRef::new(NAME, kernel)]
    }
}

verdigris_kir::parameters! {
    /// All are packed.
    struct Params / ParamsArgs of () as _spec {
        elements: u32,
        columns: Divide,
        width: u32,
        depth: u32,
        a: Read = 4,
        b: Read = 4,
        d: Write = 4,
    }
}

fn kernel() -> KernelBody {
    let header = Header { name: NAME.into(), target: Target::Sm80, threads: THREADS, min_ctas: 1, cluster: 1 };
    build(header, |k| {
        let Params { elements, columns, width, depth, a, b, d } = Params::declare(k, &());
        let element = k.cta() * THREADS + k.thread();
        k.when(element.lt(elements), || {
            let (row, column) = columns.split(element);
            let sum = k.var(0.0f32);
            k.range(depth, |i| {
                let a = k.ld_global::<f32>(a.at(row * depth + i, 4), 0);
                sum.set(k.fma(a, k.ld_global::<f32>(b.at(i * width + column, 4), 0), sum));
            });
            k.st_global(d.at(element, 4), 0, sum.get());
        });
    })
}

#[cfg(test)]
mod tests {
    use verdigris_kir::interp::{Kernels, Memory, Options, run};

    use super::*;

    #[test]
    fn a_product_is_that_of_three_loops() {
        let (m, n, k) = (5, 67, 3);
        let product = |d| Problem::Gemm(GemmProblem::packed(m as u64, n as u64, k as u64, DType::F32, d).expect("a plain product"));
        let engine = crate::engine("gemm.toy").expect("it stands in the table");
        let candidate = engine.accept(&product(DType::F32), &Arch::virtual_device(2)).expect("accepted");
        let program = candidate.program(&Knobs::default()).expect("lowers");
        let numbers = |count: usize, first: i32| (0..count as i32).map(|i| (first + 7 * i) % 13 - 6).collect::<Vec<i32>>();
        let bytes = |numbers: &[i32]| numbers.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect::<Vec<u8>>();
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 5));
        let mut memory = Memory::new();
        memory.add(&bytes(&a));
        memory.add(&bytes(&b));
        let d = memory.add_filled(4 * (m * n) as u64, 0xff);
        run(&program, &Kernels::new(), &mut memory, &Options::default()).expect("runs");
        let wanted: Vec<i32> = (0..m * n).map(|i| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum()).collect();
        assert_eq!(memory.to_vec(d), bytes(&wanted));
        let refused = engine.accept(&product(DType::F16), &Arch::virtual_device(2)).map(drop).expect_err("D is f16");
        assert_eq!(refused.reason, Reason::Layout);
    }
}
