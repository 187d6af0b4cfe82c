//! The peer: which of our problems it takes, and the fastest of its answers.

use anyhow::Result;
use verdigris::{Config, Handle};
use verdigris_cuda::peers::{
    ComputeType, CublasLt, HEURISTIC_ANSWERS, Matmul, MatmulOperands, MatmulProblem, MatmulScales, PeerError, PeerType,
};
use verdigris_cuda::{DeviceBuffer, DeviceSlice};
use verdigris_graph::{GemmProblem, HostScalar, Matrix, Order, Precision};
use verdigris_tensor::DType;

use super::data::Operands;
use super::measure;

/// What the peer may use beside the operands; its own default on this chip is 32 MiB.
const WORKSPACE_BYTES: u64 = 64 << 20;

/// Microseconds of replay for each of its answers while the fastest is looked for.
const TRIAL_US: f64 = 2000.0;

/// cuBLASLt and its workspace.
pub(super) struct Peer {
    library: CublasLt,
    workspace: DeviceBuffer,
}

/// The peer's fastest answer to a problem.
pub(super) struct Answer {
    matmul: Matmul<'static>,
    /// Its place in the heuristic's order.
    pub(super) index: usize,
    /// How many there were.
    pub(super) count: usize,
    /// Microseconds of a launch in the trial.
    pub(super) trial_us: f64,
}

impl Peer {
    /// Loads the library. `None`, with a word on stderr, where there is none.
    pub(super) fn open(handle: &Handle, config: &Config) -> Result<Option<Peer>> {
        let paths: Vec<&std::path::Path> = config.cublas_lt.as_deref().into_iter().collect();
        match CublasLt::open(handle.context(), &paths) {
            Ok(library) => Ok(Some(Peer { library, workspace: handle.pool().alloc(handle.stream(), WORKSPACE_BYTES)? })),
            Err(error @ PeerError::NotFound { .. }) => {
                eprintln!("no peer: {error}; VERDIGRIS_CUBLASLT names its path");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The library's version as it prints it: 10000 × major + 100 × minor + patch.
    pub(super) fn version(&self) -> u64 {
        self.library.version()
    }

    /// Asks for answers and times each; an answer that fails is passed over.
    pub(super) fn best(&self, handle: &Handle, gemm: &GemmProblem, operands: &Operands) -> Result<Answer> {
        let problem = translate(gemm).map_err(|why| anyhow::anyhow!(why))?;
        let matmul = self.library.matmul(&problem, MatmulScales::default(), self.workspace.len_bytes(), HEURISTIC_ANSWERS)?;
        let count = matmul.algorithm_count();
        let mut best: Option<(usize, f64)> = None;
        let mut failure = None;
        for index in 0..count {
            let submit = |i: u64| self.submit(handle, &matmul, index, operands, i % operands.copies);
            let trial = measure::rough_us(handle, &submit)
                .and_then(|rough_us| measure::brief_us(handle, operands.copies, rough_us, TRIAL_US, &submit));
            match trial {
                Ok(us) if best.is_none_or(|(_, known)| us < known) => best = Some((index, us)),
                Ok(_) => {}
                Err(error) => failure = Some(error),
            }
        }
        match (best, failure) {
            (Some((index, trial_us)), _) => Ok(Answer { matmul, index, count, trial_us }),
            (None, Some(error)) => Err(error),
            (None, None) => Err(anyhow::anyhow!("the heuristic gave no answer")),
        }
    }

    /// Runs an answer on a set of operands.
    pub(super) fn run(&self, handle: &Handle, answer: &Answer, operands: &Operands, copy: u64) -> Result<()> {
        self.submit(handle, &answer.matmul, answer.index, operands, copy)
    }

    fn submit(&self, handle: &Handle, matmul: &Matmul<'_>, index: usize, operands: &Operands, copy: u64) -> Result<()> {
        let (a, b, d): (DeviceSlice<'_>, _, _) = (operands.a.slice(copy)?, operands.b.slice(copy)?, operands.d.slice(copy)?);
        Ok(matmul.run(index, handle.stream(), &MatmulOperands { a, b, c: None, d }, self.workspace.slice())?)
    }
}

/// Our problem in the peer's terms, or why it has none for it.
fn translate(gemm: &GemmProblem) -> Result<MatmulProblem, String> {
    if gemm.c.is_some() || !gemm.epilogue.is_empty() || gemm.scale_a.is_some() || gemm.scale_b.is_some() {
        return Err("only plain products are compared".to_owned());
    }
    let HostScalar::Fixed(alpha) = gemm.alpha else { return Err("only fixed factors are compared".to_owned()) };
    if gemm.batch.len() > 1 {
        return Err(format!("{} batch dims, the peer has one", gemm.batch.len()));
    }
    let leading = |name: &str, matrix: &Matrix| matrix.leading_dimension().ok_or_else(|| format!("{name} is strided both ways"));
    if gemm.d.order() != Order::RowMajor {
        return Err("D is not row-major".to_owned());
    }
    let compute = match gemm.precision {
        Precision::F64 => ComputeType::F64,
        Precision::I32 => ComputeType::I32,
        Precision::Tf32 => ComputeType::Tf32,
        Precision::Ieee | Precision::Fp32 | Precision::Fp8Fast | Precision::Fp8Promoted => ComputeType::F32,
        Precision::F16 => return Err("sums in f16 are not compared".to_owned()),
    };
    let (a, d) = (peer_type(gemm.a.dtype)?, peer_type(gemm.d.dtype)?);
    let ld_d = leading("d", &gemm.d)?;
    let stride = |matrix: &Matrix| matrix.batch_strides.first().copied().unwrap_or(0);
    let transposes = (gemm.a.order() == Order::ColumnMajor, gemm.b.order() == Order::ColumnMajor);
    let dense = MatmulProblem::dense(gemm.m, gemm.n, gemm.k, transposes, a, d);
    Ok(MatmulProblem {
        leading_elements: [leading("a", &gemm.a)?, leading("b", &gemm.b)?, ld_d, ld_d],
        batch: u32::try_from(gemm.batch_count()).map_err(|_| format!("{} products", gemm.batch_count()))?,
        batch_stride_elements: [stride(&gemm.a), stride(&gemm.b), stride(&gemm.d), stride(&gemm.d)],
        types: [a, peer_type(gemm.b.dtype)?, dense.types[2], d],
        compute,
        alpha: alpha.0,
        fast_accumulation: gemm.precision == Precision::Fp8Fast,
        ..dense
    })
}

fn peer_type(dtype: DType) -> Result<PeerType, String> {
    Ok(match dtype {
        DType::F64 => PeerType::F64,
        DType::F32 => PeerType::F32,
        DType::F16 => PeerType::F16,
        DType::Bf16 => PeerType::Bf16,
        DType::E4m3 => PeerType::E4m3,
        DType::E5m2 => PeerType::E5m2,
        DType::I8 => PeerType::I8,
        DType::I32 => PeerType::I32,
        other => return Err(format!("the peer has no matrices of {other}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use verdigris_cli::problem::ProblemArguments;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        problem: ProblemArguments,
    }

    fn problem(dtype: &str, words: &str) -> GemmProblem {
        let line = Line::parse_from(std::iter::once("x").chain(words.split_whitespace()));
        line.problem.problem(dtype).expect("a problem").problem
    }

    #[test]
    fn problems_keep_their_layout_in_the_peers_terms() {
        let peer = translate(&problem("bf16", "-m 6 -n 8 -k 10 --layout nt --ldb 12 --batch 3")).expect("taken");
        assert_eq!((peer.m, peer.n, peer.k, peer.batch), (6, 8, 10, 3));
        assert_eq!((peer.transpose_a, peer.transpose_b), (false, true));
        assert_eq!(peer.leading_elements, [10, 12, 8, 8]);
        assert_eq!(peer.batch_stride_elements, [60, 96, 48, 48]);
        let fp8 = translate(&problem("fp8", "-m 16 -n 16 -k 16")).expect("taken");
        assert!(fp8.fast_accumulation);
        assert_eq!(fp8.types, [PeerType::E4m3, PeerType::E4m3, PeerType::Bf16, PeerType::Bf16]);
        assert_eq!(translate(&problem("tf32", "-m 4 -n 4 -k 4")).expect("taken").compute, ComputeType::Tf32);
        assert!(translate(&problem("f16", "-m 4 -n 4 -k 4 --precision f16")).is_err());
    }

    #[test]
    fn a_single_row_has_a_leading_dimension_that_the_peer_takes() {
        for words in ["-m 1 -n 8 -k 10", "-m 8 -n 1 -k 10", "-m 8 -n 8 -k 1", "-m 1 -n 1 -k 1"] {
            for layout in ["nn", "nt", "tn", "tt"] {
                let peer = translate(&problem("f32", &format!("{words} --layout {layout}"))).expect("taken");
                let (a, b) = (if peer.transpose_a { peer.m } else { peer.k }, if peer.transpose_b { peer.k } else { peer.n });
                assert!(peer.leading_elements[0] >= a && peer.leading_elements[1] >= b, "{words} {layout}: {peer:?}");
            }
        }
    }
}
