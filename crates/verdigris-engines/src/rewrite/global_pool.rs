//! `pool.reduction`: pooling by windows as large as the image, taken as the reduction that it is.
//!
//! **What.** Forward, maxima without their places and averages. Along each spatial dim there is one window, which has every element of it and no padding, or
//! as many windows as elements, one for each; the former dims are reduced, the latter stay.
//!
//! **How.** The reduction goes to `reduce.simt`: what is said of that engine holds here, and so do its knobs and its kernels. It shares the elements of an
//! image out among threads and CTAs, where a thread for each result would go through them one by one.

use verdigris_graph::{Chain, ChainStep, PoolMode, PoolPass, PoolProblem, Problem, ReduceProblem, ReductionOp, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Program};

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::Work;
use crate::engine::{Candidate, EngineId, Knobs, Notes, Reason, Refusal};
use crate::pool::whole_windows::dims_of;
use crate::reduce;

/// An accepted problem: the candidate for the reduction.
pub(super) struct GlobalPool {
    reduction: Box<dyn Candidate>,
}

impl Algorithm for GlobalPool {
    const ID: EngineId = EngineId { name: "pool.reduction", number: 601 };
    /// Its configs are those of the reductions, and as fast as they are: this rises with theirs.
    const VERSION: u32 = reduce::VERSION;
    type Config = Knobs;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(pool) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        let reduction = Problem::Reduce(reduction(pool)?);
        let mut refusals = Vec::new();
        for engine in reduce::ENGINES {
            match engine.accept(&reduction, arch) {
                Ok(reduction) => return Ok(GlobalPool { reduction }),
                Err(refusal) => refusals.push(refusal),
            }
        }
        let reason = refusals.last().map_or(Reason::Problem, |refusal| refusal.reason);
        let said: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
        Err(Self::ID.refusal(reason, said.join("; ")))
    }

    fn configs(&self) -> Vec<Knobs> {
        self.reduction.knobs().configs().to_vec()
    }

    fn knobs(config: &Knobs) -> Knobs {
        config.clone()
    }

    fn notes(&self, config: &Knobs) -> Notes {
        self.reduction.notes(config).expect("a config that the reduction lists")
    }

    fn work(&self, config: &Knobs) -> Work {
        self.reduction.work(config).expect("a config that the reduction lists")
    }

    fn lower(&self, config: &Knobs) -> Result<Program, Refusal> {
        self.reduction.program(config)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        // Its kernels are those of the reductions.
        Vec::new()
    }
}

/// The reduction, with the slots of the pooling.
fn reduction(pool: &PoolProblem) -> Result<ReduceProblem, Refusal> {
    let refuse = |reason, seen: &str| GlobalPool::ID.refusal(reason, seen);
    let (x, y) = match &pool.pass {
        PoolPass::Forward { x, samples: None, y, index: None } => (x, y),
        PoolPass::Forward { samples: Some(_), .. } => {
            return Err(refuse(Reason::Problem, "fractional windows; takes those that begin where no sample says"));
        }
        PoolPass::Forward { .. } => return Err(refuse(Reason::Problem, "maxima with their places; takes those without")),
        PoolPass::Backward { .. } => return Err(refuse(Reason::Direction, "a gradient; takes the forward direction")),
    };
    let f = match pool.mode {
        PoolMode::Max => ReductionOp::Max,
        PoolMode::Average { .. } => ReductionOp::Avg,
    };
    let dims = pool.x_dims();
    let (stays, reduced) = dims_of(pool).map_err(|seen| refuse(Reason::Extent, &seen))?;
    let seen = |view: &View, dims: &[usize]| View { strides: dims.iter().map(|&dim| view.strides[dim]).collect(), ..view.clone() };
    let mut before = Chain::default();
    let value = before.push(ChainStep::Load { from: seen(x, &[&stays[..], &reduced].concat()), window: None });
    let mut after = Chain::default();
    let whole = after.push(ChainStep::Given);
    after.push(ChainStep::Store { x: whole, to: seen(y, &stays), at: None });
    let of = |of: &[usize]| of.iter().map(|&dim| dims[dim]).collect();
    ReduceProblem { f, accumulator: pool.compute, kept: of(&stays), reduced: of(&reduced), before, value, after }
        .canonical()
        .map_err(|error| GlobalPool::ID.refusal(Reason::Layout, error))
}
