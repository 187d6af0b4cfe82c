//! The skeleton that all engines share: an algorithm says what it can do, [`Listed`] makes an engine of it.
//!
//! An [`Algorithm`] accepts a problem, lists its configs, says what each is like and lowers one to a program. What every engine does alike
//! stands here, once: configs are ranked by estimated time, the best first; one that is not listed is refused by name, or read by the name
//! that it had in an earlier version; and only the config that is asked for is lowered. [`Joined`] makes one algorithm of two.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;

use verdigris_graph::Problem;
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Program, Residency};

use crate::arch::Arch;
use crate::cost::{self, Work};
use crate::engine::{Candidate, Cost, Engine, EngineId, KnobSpace, Knobs, Notes, Reason, Refusal};

/// One algorithm for one kind of problem; a value of it is a problem that it accepted, with all that was worked out once.
pub trait Algorithm: Sized + 'static {
    /// Stable for ever.
    const ID: EngineId;

    /// What measured choices are good for: a choice that was measured under another version is passed over. Raised by whoever changes what a config
    /// means or how fast configs run, beside each other or beside other engines. A change of any of its kernels' text asks for the decision
    /// (`versions.txt` beside this crate's sources, held by a test).
    const VERSION: u32;

    /// One way to run: a tile, a split, a box.
    type Config: Clone;

    /// Can it take the problem on such a machine? Reads as a list of requirements.
    ///
    /// # Errors
    /// A [`Refusal`] that names the first requirement not met.
    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal>;

    /// Every legal config, in any order. Among configs of equal cost, the first is preferred. Not empty.
    fn configs(&self) -> Vec<Self::Config>;

    /// The config's name, as plan caches, records and `explain` speak it: stable for ever, and another for each of [`Algorithm::configs`].
    fn knobs(config: &Self::Config) -> Knobs;

    /// The name that a config of today had in an earlier version, in today's words; `None` for names that mean nothing any more.
    fn renamed(_old: &Knobs) -> Option<Knobs> {
        None
    }

    /// Numerical and behaviour notes.
    fn notes(&self, config: &Self::Config) -> Notes;

    /// What the config asks of the chip, in counts; the model of [`crate::cost`] makes time of it.
    fn work(&self, config: &Self::Config) -> Work;

    /// Launches and scratch.
    ///
    /// # Errors
    /// A [`Refusal`] where the launches cannot be made after all, such as too many of them.
    fn lower(&self, config: &Self::Config) -> Result<Program, Refusal>;

    /// Every kernel that it may launch on chips of `target`, fused chains apart.
    fn catalog(target: Target) -> Vec<KernelRef>;
}

/// Two algorithms of one engine, for other directions or other ways to the same result: their configs are ranked in one list. Each is named
/// by knobs that no config of the other has; a problem that both refuse is refused with what both say.
pub struct Joined<A, B> {
    first: Option<Rc<A>>,
    second: Option<Rc<B>>,
}

/// A config of either, with the accepted problem that it is of.
pub enum Either<A: Algorithm, B: Algorithm> {
    /// Of the first algorithm.
    First(Rc<A>, A::Config),
    /// Of the second.
    Second(Rc<B>, B::Config),
}

impl<A: Algorithm, B: Algorithm> Clone for Either<A, B> {
    fn clone(&self) -> Self {
        match self {
            Either::First(accepted, config) => Either::First(accepted.clone(), config.clone()),
            Either::Second(accepted, config) => Either::Second(accepted.clone(), config.clone()),
        }
    }
}

impl<A: Algorithm, B: Algorithm> Algorithm for Joined<A, B> {
    const ID: EngineId = A::ID;
    /// Rises with either.
    const VERSION: u32 = {
        assert!(A::ID.number == B::ID.number, "one engine has one id");
        A::VERSION + B::VERSION - 1
    };
    type Config = Either<A, B>;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        match (A::accept(problem, arch), B::accept(problem, arch)) {
            (Err(first), Err(second)) => Err(first.beside(second)),
            (first, second) => Ok(Joined { first: first.ok().map(Rc::new), second: second.ok().map(Rc::new) }),
        }
    }

    fn configs(&self) -> Vec<Either<A, B>> {
        let first = self.first.iter().flat_map(|first| first.configs().into_iter().map(|config| Either::First(first.clone(), config)));
        let second =
            self.second.iter().flat_map(|second| second.configs().into_iter().map(|config| Either::Second(second.clone(), config)));
        first.chain(second).collect()
    }

    fn knobs(config: &Either<A, B>) -> Knobs {
        match config {
            Either::First(_, config) => A::knobs(config),
            Either::Second(_, config) => B::knobs(config),
        }
    }

    fn renamed(old: &Knobs) -> Option<Knobs> {
        A::renamed(old).or_else(|| B::renamed(old))
    }

    fn notes(&self, config: &Either<A, B>) -> Notes {
        match config {
            Either::First(accepted, config) => accepted.notes(config),
            Either::Second(accepted, config) => accepted.notes(config),
        }
    }

    fn work(&self, config: &Either<A, B>) -> Work {
        match config {
            Either::First(accepted, config) => accepted.work(config),
            Either::Second(accepted, config) => accepted.work(config),
        }
    }

    fn lower(&self, config: &Either<A, B>) -> Result<Program, Refusal> {
        match config {
            Either::First(accepted, config) => accepted.lower(config),
            Either::Second(accepted, config) => accepted.lower(config),
        }
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        // They may share kernels, such as those of a reduction.
        let mut seen = HashSet::new();
        A::catalog(target).into_iter().chain(B::catalog(target)).filter(|kernel| seen.insert(kernel.name().to_owned())).collect()
    }
}

/// The engine of an algorithm.
pub struct Listed<A>(PhantomData<fn() -> A>);

impl<A> Listed<A> {
    /// The engine, for a family's table.
    pub const fn new() -> Self {
        Listed(PhantomData)
    }
}

impl<A> Default for Listed<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Algorithm> fmt::Debug for Listed<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listed({})", A::ID)
    }
}

impl<A: Algorithm> Engine for Listed<A> {
    fn id(&self) -> EngineId {
        A::ID
    }

    fn version(&self) -> u32 {
        A::VERSION
    }

    fn accept(&self, problem: &Problem, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
        candidate(A::accept(problem, arch)?, arch)
    }

    fn catalog(&self, target: Target) -> Vec<KernelRef> {
        A::catalog(target)
    }
}

/// An accepted problem with its configs, ranked.
pub(crate) fn candidate<A: Algorithm>(accepted: A, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
    let configs = accepted.configs();
    let works: Vec<Work> = configs.iter().map(|config| accepted.work(config)).collect();
    let costs = cost::estimate(&works, arch);
    A::ID.require(!configs.is_empty(), Reason::Knobs, "no config fits")?;
    // Stable: among equals, the algorithm's own preference.
    let mut order: Vec<usize> = (0..configs.len()).collect();
    order.sort_by(|&one, &other| costs[one].us.total_cmp(&costs[other].us));
    let mut configs: Vec<Option<A::Config>> = configs.into_iter().map(Some).collect();
    let ranked = order.into_iter().filter_map(|place| Some((configs[place].take()?, costs[place]))).collect();
    Ok(Box::new(Accepted { accepted, arch: arch.clone(), ranked, space: OnceCell::new() }))
}

struct Accepted<A: Algorithm> {
    accepted: A,
    arch: Arch,
    /// The best by estimate first; never empty.
    ranked: Vec<(A::Config, Cost)>,
    /// Their names, in the same order: made when somebody asks for more than the best.
    space: OnceCell<KnobSpace>,
}

impl<A: Algorithm> Accepted<A> {
    fn place(&self, knobs: &Knobs) -> Option<usize> {
        if self.best() == *knobs { Some(0) } else { self.knobs().configs().iter().position(|listed| listed == knobs) }
    }

    fn find(&self, knobs: &Knobs) -> Result<&(A::Config, Cost), Refusal> {
        let place = self.place(knobs).or_else(|| A::renamed(knobs).and_then(|today| self.place(&today)));
        place.and_then(|place| self.ranked.get(place)).ok_or_else(|| {
            A::ID.refusal(Reason::Knobs, format_args!("{knobs} is no config of this problem; the best by estimate is {}", self.best()))
        })
    }
}

impl<A: Algorithm> Candidate for Accepted<A> {
    fn knobs(&self) -> &KnobSpace {
        self.space.get_or_init(|| {
            let mut knobs = self.ranked.iter().map(|(config, _)| A::knobs(config));
            let space = KnobSpace::new(knobs.next().unwrap_or_default(), knobs);
            debug_assert_eq!(space.configs().len(), self.ranked.len(), "two configs of {} have one name", A::ID);
            space
        })
    }

    fn best(&self) -> Knobs {
        self.ranked.first().map(|(config, _)| A::knobs(config)).unwrap_or_default()
    }

    fn today(&self, knobs: &Knobs) -> Option<Knobs> {
        self.find(knobs).ok().map(|(config, _)| A::knobs(config))
    }

    fn notes(&self, knobs: &Knobs) -> Result<Notes, Refusal> {
        self.find(knobs).map(|(config, _)| self.accepted.notes(config))
    }

    fn work(&self, knobs: &Knobs) -> Result<Work, Refusal> {
        self.find(knobs).map(|(config, _)| self.accepted.work(config))
    }

    fn cost(&self, knobs: &Knobs) -> Result<Cost, Refusal> {
        self.find(knobs).map(|(_, cost)| *cost)
    }

    fn program(&self, knobs: &Knobs) -> Result<Program, Refusal> {
        let program = self.find(knobs).and_then(|(config, _)| self.accepted.lower(config))?;
        // Few launches ask for it, so that few kernels are built for the question.
        for launch in program.launches().filter(|launch| launch.residency == Residency::All) {
            let body = launch.kernel.build();
            let clusters = self.arch.resident_clusters_of(body.cluster);
            let checked = launch.check_residency(&body, self.arch.sm_count, clusters);
            checked.map_err(|mismatch| A::ID.refusal(Reason::Residency, mismatch))?;
        }
        Ok(program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Stream, Traffic};
    use verdigris_graph::GemmProblem;
    use verdigris_kir::face::{Header, build};
    use verdigris_kir::program::Launch;
    use verdigris_tensor::DType;

    /// Config 0 moves three times the bytes of configs 1 and 2; 2 was called 7.
    #[derive(Debug)]
    struct Three;

    impl Algorithm for Three {
        const ID: EngineId = EngineId { name: "test.three", number: 1 };
        const VERSION: u32 = 1;
        type Config = u32;

        fn accept(problem: &Problem, _: &Arch) -> Result<Self, Refusal> {
            let Problem::Gemm(gemm) = problem else {
                return Err(Self::ID.refusal(Reason::Problem, problem.kind()));
            };
            Self::ID.require(gemm.k > 1, Reason::Extent, format_args!("k = {}", gemm.k))?;
            Ok(Three)
        }

        fn configs(&self) -> Vec<u32> {
            vec![0, 2, 1]
        }

        fn knobs(config: &u32) -> Knobs {
            Knobs::new([("way", *config)])
        }

        fn renamed(old: &Knobs) -> Option<Knobs> {
            (old.value("way") == Some(7)).then(|| Knobs::new([("way", 2)]))
        }

        fn notes(&self, config: &u32) -> Notes {
            Notes {
                tensor_core: *config == 1,
                deterministic: true,
                down_convert: None,
                accumulator: DType::F32,
                reduced_sums: false,
                split_operands: false,
            }
        }

        fn work(&self, config: &u32) -> Work {
            let bytes = [30e9, 10e9, 10e9][*config as usize];
            Work::default().beside([Stream::new(Traffic::Lines, bytes)])
        }

        fn lower(&self, config: &u32) -> Result<Program, Refusal> {
            let mut program = Program::default();
            program.add_scratch("sums", u64::from(*config));
            Ok(program)
        }

        fn catalog(_: Target) -> Vec<KernelRef> {
            Vec::new()
        }
    }

    /// Config 3 moves 20e9 bytes; takes rows beyond 4 alone.
    #[derive(Debug)]
    struct One {
        rows: u64,
    }

    impl Algorithm for One {
        const ID: EngineId = Three::ID;
        const VERSION: u32 = 3;
        type Config = ();

        fn accept(problem: &Problem, _: &Arch) -> Result<Self, Refusal> {
            let Problem::Gemm(gemm) = problem else {
                return Err(Self::ID.refusal(Reason::Problem, problem.kind()));
            };
            Self::ID.require(gemm.m > 4, Reason::Layout, format_args!("m = {}", gemm.m))?;
            Ok(One { rows: gemm.m })
        }

        fn configs(&self) -> Vec<()> {
            vec![()]
        }

        fn knobs((): &()) -> Knobs {
            Knobs::new([("other", 0)])
        }

        fn notes(&self, (): &()) -> Notes {
            Notes::of(DType::F64)
        }

        fn work(&self, (): &()) -> Work {
            Work::default().beside([Stream::new(Traffic::Lines, 20e9)])
        }

        /// A launch whose CTAs wait for each other, one for each row.
        fn lower(&self, (): &()) -> Result<Program, Refusal> {
            let header = Header { name: "waiting".to_owned(), target: Target::Sm90, threads: 32, min_ctas: 1, cluster: 1 };
            let kernel = KernelRef::new("waiting".to_owned(), move || build(header.clone(), |_| {}));
            let mut program = Program::default();
            program.launch(Launch::new(kernel, [self.rows as u32, 1, 1], Vec::new().into()).resident());
            Ok(program)
        }

        fn catalog(_: Target) -> Vec<KernelRef> {
            Vec::new()
        }
    }

    fn asked_of<A: Algorithm>(m: u64, k: u64) -> Result<Box<dyn Candidate>, Refusal> {
        let gemm = GemmProblem::packed(m, 8, k, DType::F32, DType::F32).expect("a plain product");
        Listed::<A>::new().accept(&Problem::Gemm(gemm), &Arch::virtual_device(2))
    }

    fn asked(k: u64) -> Result<Box<dyn Candidate>, Refusal> {
        asked_of::<Three>(8, k)
    }

    #[test]
    fn a_program_whose_ctas_wait_for_each_other_has_room_for_them_or_is_refused() {
        let gemm = GemmProblem::packed(6, 8, 8, DType::F32, DType::F32).expect("a plain product");
        let on = |sms| {
            let candidate = Listed::<One>::new().accept(&Problem::Gemm(gemm.clone()), &Arch::virtual_device(sms)).expect("accepted");
            candidate.program(&Knobs::new([("other", 0)]))
        };
        assert_eq!(on(6).map(|program| program.steps.len()), Ok(1));
        let refusal = on(5).expect_err("six CTAs, one an SM");
        assert_eq!(refusal.reason, Reason::Residency);
        assert!(refusal.seen.contains("6 CTAs wait for each other, and the chip surely holds 5 at once"), "{refusal}");
    }

    #[test]
    fn configs_of_joined_algorithms_are_ranked_in_one_list_and_both_refusals_show() {
        type Both = Joined<Three, One>;
        let names = |candidate: &dyn Candidate| candidate.knobs().configs().iter().map(Knobs::to_string).collect::<Vec<_>>();
        let both = asked_of::<Both>(8, 8).expect("accepted");
        assert_eq!(names(&*both), ["way=2", "way=1", "other=0", "way=0"]);
        assert_eq!(both.notes(&Knobs::new([("other", 0)])).map(|notes| notes.accumulator), Ok(DType::F64));
        assert_eq!(
            both.program(&Knobs::new([("way", 7)])).map(|program| program.scratch[0].bytes),
            Ok(2),
            "the name of an earlier version"
        );
        assert_eq!(names(&*asked_of::<Both>(8, 1).expect("the second takes it")), ["other=0"]);
        assert_eq!(names(&*asked_of::<Both>(2, 8).expect("the first takes it")), ["way=2", "way=1", "way=0"]);
        let refusal = asked_of::<Both>(2, 1).map(|_| ()).expect_err("neither takes it");
        assert_eq!((refusal.reason, refusal.seen.as_str()), (Reason::Extent, "k = 1; or layout: m = 2"));
        assert_eq!(Listed::<Both>::new().version(), 3, "it rises with either");
    }

    #[test]
    fn configs_are_ranked_once_and_the_first_of_equals_is_preferred() {
        let candidate = asked(8).expect("accepted");
        let ways: Vec<_> = candidate.knobs().configs().iter().filter_map(|knobs| knobs.value("way")).collect();
        assert_eq!(ways, [2, 1, 0]);
        let us = |way| candidate.cost(&Knobs::new([("way", way)])).expect("listed").us;
        assert!(us(0) > 2.0 * us(1) && us(1) == us(2), "{} {} {}", us(0), us(1), us(2));
        assert_eq!(candidate.notes(&Knobs::new([("way", 1)])).map(|notes| notes.tensor_core), Ok(true));
        assert_eq!(asked(1).map(|_| ()).expect_err("refused").reason, Reason::Extent);
    }

    #[test]
    fn a_config_is_found_by_its_old_name_and_an_unknown_one_is_refused() {
        let candidate = asked(8).expect("accepted");
        assert_eq!(
            [7, 2, 5].map(|way| candidate.today(&Knobs::new([("way", way)])).and_then(|knobs| knobs.value("way"))),
            [Some(2), Some(2), None]
        );
        let scratch = |way| candidate.program(&Knobs::new([("way", way)])).map(|program| program.scratch[0].bytes);
        assert_eq!(scratch(2), Ok(2));
        assert_eq!(scratch(7), Ok(2), "the name of an earlier version");
        for refusal in [scratch(5).expect_err("unknown"), candidate.cost(&Knobs::new([("way", 5)])).expect_err("unknown")] {
            assert_eq!(refusal.reason, Reason::Knobs);
            assert_eq!(refusal.seen, "way=5 is no config of this problem; the best by estimate is way=2");
        }
    }
}
