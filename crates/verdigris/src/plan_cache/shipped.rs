//! The set of choices that ships with the library: its text, and how choices get into it.

use super::{Answer, Fields, Question, line_of, parse};

/// What ships.
pub(super) const SET: &str = include_str!("../../tuned/tuned.txt");

/// A choice for the set that ships.
#[derive(Clone, PartialEq, Debug)]
pub struct TunedChoice {
    /// What it was measured for.
    pub question: Question,
    /// The fastest way.
    pub answer: Answer,
    /// A line for readers: what the problem is, and what the choice brings.
    pub remark: String,
}

/// The text of a set that ships, `existing`, with these choices in it: each after its remark, in the place of an earlier one for the same
/// problem on the same kind of device. They serve under any limits that the chosen way keeps, since what is fastest of all is fastest of fewer
/// as well. Other lines stay as they are.
pub fn with_choices(existing: &str, choices: &[TunedChoice]) -> String {
    let lines: Vec<(String, Fields)> = (choices.iter())
        .map(|TunedChoice { question, answer, remark }| {
            let mut fields = question.fields();
            fields[3] = "*".to_owned();
            (format!("# {}\n{}", remark.replace(['\n', '\r'], " "), line_of(&fields, answer)), fields)
        })
        .collect();
    let is_replaced = |known: &Fields| lines.iter().any(|(_, new)| new[..2] == known[..2]);
    let existing = if existing.trim().is_empty() { SET_HEAD } else { existing };
    let is_head = |line: &str| SET_HEAD.lines().any(|head| head == line);
    let mut kept: Vec<&str> = Vec::new();
    for line in existing.lines() {
        if !matches!(parse(line), Ok(Some((fields, _))) if is_replaced(&fields)) {
            kept.push(line);
        } else if kept.last().is_some_and(|above| above.starts_with("# ") && !is_head(above)) {
            // Its remark.
            kept.pop();
        }
    }
    kept.into_iter().flat_map(|line| [line, "\n"]).chain(lines.iter().map(|(text, _)| text.as_str())).collect()
}

/// The head of a set that ships: comments that belong to no line.
const SET_HEAD: &str = "\
# Choices that were measured and ship with the library, consulted after the user's own plan cache.
# Lines as plan caches have them (crates/verdigris/src/plan_cache): form, problem in words, device, driver, limits, engine, its version, config, us, check;
# `*` in a field stands for any value.
";

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use verdigris_engines::arch::Arch;
    use verdigris_engines::engine::Knobs;
    use verdigris_graph::{GemmProblem, Problem};
    use verdigris_tensor::DType;

    use super::super::PlanCache;
    use super::*;

    fn question(m: u64) -> Question {
        let gemm = GemmProblem::packed(m, 4, 5, DType::F32, DType::F32).expect("a plain product");
        Question { problem: Problem::Gemm(gemm).to_string(), device: "D".to_owned(), driver: "1".to_owned(), policy: String::new() }
    }

    fn answer(tile: u32) -> Answer {
        Answer { engine: "gemm.simt".to_owned(), version: 1, knobs: Knobs::new([("tile", tile)]), us: 12.5 }
    }

    #[test]
    fn a_set_that_ships_is_written_and_mended() {
        let head = SET_HEAD;
        assert!(SET.starts_with(head));
        let choice =
            |m: u64, tile: u32| TunedChoice { question: question(m), answer: answer(tile), remark: format!("problem {m}\ntile {tile}") };
        let first = with_choices("", &[choice(1, 10), choice(2, 20)]);
        assert!(first.starts_with(head) && first.contains("# problem 2 tile 20\nplan2\tgemm f32 m=2 n=4 k=5\t"), "{first}");
        let second = with_choices(&first, &[choice(2, 21), choice(3, 30)]);
        assert_eq!(second.lines().count(), head.lines().count() + 2 * 3, "{second}");
        assert!(!second.contains("tile 20") && second.starts_with(head), "{second}");
        let cache = PlanCache::with_shipped(None, second).expect("opens");
        assert_eq!(
            [1, 2, 3].map(|m| cache.find(&question(m)).expect("reads").map(|(answer, _)| answer)),
            [10, 21, 30].map(|tile| Some(answer(tile)))
        );
        // A set of one line whose only comment is the head keeps it.
        let bare: String = head.to_owned() + first.lines().nth(head.lines().count() + 1).expect("a line") + "\n";
        assert!(with_choices(&bare, &[choice(1, 11)]).starts_with(head));
    }

    /// What a line of the set lacks to be used by this build on the chip that it was measured on.
    fn unresolved(problem: &str, answer: &Answer) -> Option<String> {
        let problem: Problem = match problem.parse() {
            Ok(problem) => problem,
            Err(error) => return Some(error.to_string()),
        };
        let Some(engine) = verdigris_engines::engine(&answer.engine) else { return Some("no such engine".to_owned()) };
        if engine.version() != answer.version {
            return Some(format!("measured with version {}, the engine has {}", answer.version, engine.version()));
        }
        let candidate = match engine.accept(&problem, &Arch::h200()) {
            Ok(candidate) => candidate,
            Err(refusal) => return Some(refusal.to_string()),
        };
        // A config may be named as an earlier version of it was; it is listed under its name of today.
        candidate.cost(&answer.knobs).err().map(|refusal| refusal.to_string())
    }

    #[test]
    fn every_line_that_ships_can_be_used() {
        let mut seen: HashMap<Fields, usize> = HashMap::new();
        let (mut count, mut lost) = (0, Vec::new());
        for (number, line) in SET.lines().enumerate() {
            let Some((fields, answer)) = parse(line).unwrap_or_else(|what| panic!("line {}: {what}", number + 1)) else { continue };
            count += 1;
            let problem = &fields[0];
            if let Some(why) = unresolved(problem, &answer) {
                lost.push(format!("line {}, {problem}: {} {}: {why}", number + 1, answer.engine, answer.knobs));
            } else if problem.parse::<Problem>().is_ok_and(|read| read.to_string() != *problem) {
                lost.push(format!("line {}: these are not the words of the problem: {problem}", number + 1));
            }
            if let Some(earlier) = seen.insert(fields, number + 1) {
                lost.push(format!("line {}: asks what line {earlier} asks", number + 1));
            }
        }
        assert!(lost.is_empty(), "{} of {count} lines that ship cannot be used:\n{}", lost.len(), lost.join("\n"));
        assert!(count > 900, "{count} lines ship");
    }

    #[test]
    fn lines_under_earlier_names_of_engines_can_be_used() {
        for (problem, engine, knobs) in [
            (
                "conv wgrad bf16 nhwc 3d n=2 c=32 d=128 h=128 w=128 k=64 t=3 r=3 s=3 pad=1",
                "conv.halo_wgrad",
                "axis=0,deep=2,high=16,order=0,parts=44,shape=5,wide=8",
            ),
            ("conv fprop bf16 nhwc n=64 c=256 h=28 w=28 k=256 r=3 s=3 groups=32 pad=1", "conv.diagonal", "tile=1"),
        ] {
            let knobs = super::super::knobs_of(knobs).expect("reads");
            let answer = Answer { engine: engine.to_owned(), version: 1, knobs, us: 1.0 };
            assert_eq!(unresolved(problem, &answer), None, "{engine}");
        }
    }

    #[test]
    fn what_makes_a_line_useless_is_told() {
        let gemm = "gemm bf16 m=4096 n=4096 k=4096";
        let engine = verdigris_engines::engine("gemm.wgmma").expect("is there");
        let config = engine.accept(&gemm.parse().expect("reads"), &Arch::h200()).expect("takes it").knobs().default_config().clone();
        let good = Answer { engine: "gemm.wgmma".to_owned(), version: engine.version(), knobs: config, us: 1.0 };
        assert_eq!(unresolved(gemm, &good), None);
        let told = |problem: &str, change: fn(&mut Answer)| {
            let mut changed = good.clone();
            change(&mut changed);
            unresolved(problem, &changed).expect("cannot be used")
        };
        assert!(told("gemm bf16 m=4096", |_| {}).contains("`n=` is missing"));
        assert!(told(gemm, |answer| answer.engine.push('x')).contains("no such engine"));
        assert!(told(gemm, |answer| answer.version += 1).contains("the engine has"));
        assert!(told(gemm, |answer| answer.knobs = Knobs::new([("tile", 4321)])).contains("tile=4321"));
        assert!(told("map f32 dims=4 + load(packed) + store(0,packed)", |_| {}).contains("gemm.wgmma"));
    }
}
