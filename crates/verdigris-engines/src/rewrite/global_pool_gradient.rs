//! `pool.map`: the gradient of averages over windows as large as the image, taken as the map that it is.
//!
//! **What.** `dx = dy / N` for each of a window's `N` elements, where along each spatial dim there is one window, which has every element of it and no
//! padding, or one window for each element.
//!
//! **How.** The map goes to `map.simt`: what is said of that engine holds here, and so do its knobs and its kernels. It writes several elements at once and
//! reads `dy` once for them, where a gradient that gathers asks each element for its windows.
//!
//! **Numbers.** `dy` times the rounded `1 / N`.

use verdigris_graph::{Chain, ChainStep, MapProblem, PoolMode, PoolPass, PoolProblem, Problem, Real, UnaryOp, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Program};

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::Work;
use crate::engine::{Candidate, EngineId, Knobs, Notes, Reason, Refusal};
use crate::map;
use crate::pool::whole_windows::dims_of;

/// An accepted problem: the candidate for the map.
pub(super) struct GlobalPoolGradient {
    map: Box<dyn Candidate>,
}

impl Algorithm for GlobalPoolGradient {
    const ID: EngineId = EngineId { name: "pool.map", number: 602 };
    /// Its configs are those of the maps, and as fast as they are: this rises with theirs.
    const VERSION: u32 = map::VERSION;
    type Config = Knobs;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(pool) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        let map = Problem::Map(map_of(pool)?);
        let mut refusals = Vec::new();
        for engine in map::ENGINES {
            match engine.accept(&map, arch) {
                Ok(map) => return Ok(GlobalPoolGradient { map }),
                Err(refusal) => refusals.push(refusal),
            }
        }
        let reason = refusals.last().map_or(Reason::Problem, |refusal| refusal.reason);
        let said: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
        Err(Self::ID.refusal(reason, said.join("; ")))
    }

    fn configs(&self) -> Vec<Knobs> {
        self.map.knobs().configs().to_vec()
    }

    fn knobs(config: &Knobs) -> Knobs {
        config.clone()
    }

    fn notes(&self, config: &Knobs) -> Notes {
        self.map.notes(config).expect("a config that the map lists")
    }

    fn work(&self, config: &Knobs) -> Work {
        self.map.work(config).expect("a config that the map lists")
    }

    fn lower(&self, config: &Knobs) -> Result<Program, Refusal> {
        self.map.program(config)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        // Its kernels are those of the maps.
        Vec::new()
    }
}

/// The map, with the slots of the pooling.
fn map_of(pool: &PoolProblem) -> Result<MapProblem, Refusal> {
    let refuse = |reason, seen: &str| GlobalPoolGradient::ID.refusal(reason, seen);
    let (PoolMode::Average { .. }, PoolPass::Backward { dy, dx, .. }) = (pool.mode, &pool.pass) else {
        return match (pool.mode, &pool.pass) {
            (_, PoolPass::Forward { .. }) => Err(refuse(Reason::Direction, "the forward direction; takes gradients")),
            _ => Err(refuse(Reason::Problem, "maxima; takes averages")),
        };
    };
    let (_, whole) = dims_of(pool).map_err(|seen| refuse(Reason::Extent, &seen))?;
    let dims = pool.x_dims();
    let count: u64 = whole.iter().map(|&dim| dims[dim]).product();
    let strides = (0..dims.len()).map(|dim| if whole.contains(&dim) { 0 } else { dy.strides[dim] }).collect();
    let mut chain = Chain::default();
    let dy = chain.push(ChainStep::Load { from: View { strides, ..dy.clone() }, window: None });
    // A shift of −0 keeps the sign of 0.
    let part = chain.push(ChainStep::Unary { f: UnaryOp::Affine { scale: Real(1.0 / count as f64), shift: Real(-0.0) }, x: dy });
    chain.push(ChainStep::Store { x: part, to: dx.clone(), at: None });
    MapProblem { dims: dims.to_vec(), chain }.canonical().map_err(|error| GlobalPoolGradient::ID.refusal(Reason::Layout, error))
}
