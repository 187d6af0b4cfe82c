//! The cases, which the interpreter and the device run alike.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use verdigris::{Limits, Ranked, Settings, select};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Knobs, Refusal};
use verdigris_graph::{EpilogueStep, Problem};
use verdigris_reference::cases::{self, Case};
use verdigris_reference::compare::compare;
use verdigris_reference::data;
use verdigris_reference::run::{Expected, Inputs, Positions, run};

/// The case files of the repository, for a program that was copied without them.
const EMBEDDED: &[(&str, &str)] = &[("gemm", include_str!("../../../cases/gemm.toml"))];

/// The cases of a family (of all of them, if none is named) whose id contains the filter: from cases/ in the current folder, else from
/// the copy inside this program.
pub(crate) fn load(family: Option<&str>, file: Option<&PathBuf>, filter: &str) -> Result<Vec<Case>> {
    let list = matching(family, file, filter)?;
    if list.is_empty() {
        bail!("no case has `{filter}` in its id");
    }
    Ok(list)
}

/// As [`load`]; none, if the filter names none.
pub(crate) fn matching(family: Option<&str>, file: Option<&PathBuf>, filter: &str) -> Result<Vec<Case>> {
    let mut list = Vec::new();
    if let Some(path) = file {
        list = cases::load_file(path).with_context(|| format!("the cases of {}", path.display()))?;
    } else {
        for (name, text) in EMBEDDED.iter().filter(|(name, _)| family.is_none_or(|family| family == *name)) {
            let beside = PathBuf::from("cases").join(format!("{name}.toml"));
            let cases = if beside.is_file() { cases::load_file(&beside) } else { cases::load(name, text) };
            list.extend(cases.with_context(|| format!("the cases of {}", beside.display()))?);
        }
    }
    list.retain(|case| case.id.contains(filter));
    Ok(list)
}

/// A case with its inputs and what its outputs must be.
pub(crate) struct Prepared {
    pub(crate) case: Case,
    pub(crate) inputs: Inputs,
    expected: Vec<Expected>,
    /// What the output buffers hold before the run.
    before: Vec<(usize, Vec<u8>)>,
    slots: usize,
}

/// What stands in a slot before the run.
pub(crate) enum Content<'a> {
    /// Bytes that are read, or a sentinel in an output, or both.
    Bytes(&'a [u8]),
    /// A host scalar.
    Scalar(f64),
    /// One that is an integer: the seed or the offset of random numbers.
    Integer(i64),
}

impl Prepared {
    pub(crate) fn new(case: Case) -> Result<Prepared> {
        let inputs = data::inputs(&case.problem, case.distribution, case.seed);
        let expected = run(&case.problem, &inputs, Positions::All).with_context(|| format!("the reference of {}", case.id))?;
        let before = expected.iter().map(|output| (output.id.0 as usize, data::output_buffer(output, &inputs))).collect();
        let slots = case.problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
        Ok(Prepared { case, inputs, expected, before, slots })
    }

    /// What each slot holds, in their order.
    pub(crate) fn contents(&self) -> Vec<Content<'_>> {
        let epilogue = if let Problem::Gemm(gemm) = &self.case.problem { &gemm.epilogue[..] } else { &[] };
        let is_integer = |slot| {
            let of_state = |step: &EpilogueStep| matches!(step, EpilogueStep::Random { number, offset: Some(offset), .. } if [number.slot, *offset].contains(&slot));
            epilogue.iter().any(of_state)
        };
        let content = |slot: usize| {
            let key = verdigris_graph::Slot(slot as u32);
            if let Some((_, bytes)) = self.before.iter().find(|(output, _)| *output == slot) {
                Content::Bytes(bytes)
            } else if let Some(value) = self.inputs.scalars.get(&key) {
                if is_integer(key) { Content::Integer(*value as i64) } else { Content::Scalar(*value) }
            } else {
                Content::Bytes(self.inputs.buffers.get(&key).map_or(&[], Vec::as_slice))
            }
        };
        (0..self.slots).map(content).collect()
    }

    /// The slots that are written.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = usize> {
        self.before.iter().map(|(slot, _)| *slot)
    }

    /// How many elements the outputs have, and about how many of them the rounding model says nothing.
    pub(crate) fn judged(&self) -> (u64, u64) {
        let values = || self.expected.iter().flat_map(|output| &output.values);
        (values().count() as u64, values().filter(|value| value.error == f64::INFINITY).count() as u64)
    }

    /// What is wrong with the outputs, given the bytes of each after the run; `None` if all are right.
    pub(crate) fn judge(&self, mut after: impl FnMut(usize) -> Result<Vec<u8>>) -> Result<Option<String>> {
        for (expected, (slot, before)) in self.expected.iter().zip(&self.before) {
            let report = compare(expected, before, &after(*slot)?);
            if !report.passes() {
                return Ok(Some(format!("output in slot {slot}: {report}")));
            }
        }
        Ok(None)
    }
}

/// One engine's way to compute a problem by one setting, or why not.
pub(crate) fn way(engine: &'static dyn Engine, problem: &Problem, arch: &Arch, knobs: &Knobs) -> Result<Ranked, Option<Refusal>> {
    let limits = Limits { settings: Settings::Matching(knobs.clone()), ..Limits::default() };
    let mut survey = select::survey_of([engine], problem, arch, &limits);
    // Knobs that are named in full have one way at most.
    if survey.ranked.is_empty() { Err(survey.refusals.pop()) } else { Ok(survey.ranked.swap_remove(0)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_in_the_program_are_read_and_filtered() {
        let all = load(None, None, "").expect("reads");
        assert!(all.len() > 100);
        let few = load(Some("gemm"), None, "bf16-edge-m").expect("some");
        assert!(!few.is_empty() && few.len() < all.len());
        assert!(load(None, None, "no such case").expect_err("none").to_string().contains("`no such case`"));
    }

    #[test]
    fn a_right_output_passes_and_an_unwritten_one_does_not() {
        let case = load(None, None, "gemm/bf16-edge-m/").expect("some").remove(0);
        let prepared = Prepared::new(case).expect("prepares");
        let right = |slot: usize| {
            let place = prepared.before.iter().position(|(output, _)| *output == slot).expect("an output");
            Ok(prepared.expected[place].rounded(&prepared.before[place].1))
        };
        assert_eq!(prepared.judge(right).expect("judges"), None);
        let untouched = |slot: usize| Ok(prepared.before.iter().find(|(output, _)| *output == slot).expect("an output").1.clone());
        assert!(prepared.judge(untouched).expect("judges").is_some_and(|fault| fault.contains("not written")));
    }
}
