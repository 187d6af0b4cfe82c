//! The mistakes of the first review of the proofs, by number, and that each of them is a row or says why it is none.
//!
//! The review planted 102 mistakes by hand, before there were rows; its numbers have gaps. A row says by `review = […]` which of them it is, so that what was once
//! missed cannot come to be missed again unseen. Where the review tells several numbers as one group, each row of the group names them all.

use std::collections::BTreeSet;

use super::list::List;

/// With this list of mutants come those of the review: a tree without it has none to hold.
pub(super) const LIST: &str = "mutants/printer.toml";

/// Ranges of numbers, both ends among them, of mistakes that are real.
const MISTAKES: &[(u32, u32)] = &[
    (1, 18),
    (20, 28),
    (30, 35),
    (37, 47),
    (50, 56),
    (61, 62),
    (64, 65),
    (67, 68),
    (70, 70),
    (73, 74),
    (77, 78),
    (82, 95),
    (101, 101),
    (103, 103),
    (105, 105),
    (109, 111),
    (113, 113),
    (201, 208),
    (210, 210),
    (214, 214),
    (216, 217),
    (219, 219),
];

/// Numbers of the review that turned out to be no mistake, and why.
const NO_MISTAKES: &[(u32, &str)] = &[
    (
        19,
        "the barrier behind the reading of a split tile's counter is not needed: count begins with one (split_k/trailing-barrier, an `equivalent`)",
    ),
    (36, "the review found no difference, and tells no text"),
    (112, "the review found no difference, and tells no text"),
    (209, "a probe; the review found no difference, and tells no text"),
    (218, "a probe; the review found no difference, and tells no text"),
];

/// What is wrong between the review and the rows, a line each.
pub(super) fn missing(list: &List) -> Vec<String> {
    let wanted: BTreeSet<u32> = MISTAKES.iter().flat_map(|&(first, last)| first..=last).collect();
    let excused: BTreeSet<u32> = NO_MISTAKES.iter().map(|(number, _)| *number).collect();
    let named: BTreeSet<u32> = list.mutants.iter().flat_map(|mutant| mutant.entry.review.iter().copied()).collect();
    let lacking =
        wanted.difference(&named).map(|number| format!("no mutant is mistake {number} of the review: a row names it by `review`"));
    let strange = list.mutants.iter().flat_map(|mutant| {
        let numbers = mutant.entry.review.iter().filter(|number| !wanted.contains(number));
        numbers.map(|number| match excused.contains(number) {
            true => format!("mutant {}: number {number} of the review is no mistake", mutant.id),
            false => format!("mutant {}: the review has no number {number}", mutant.id),
        })
    });
    lacking.chain(strange).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    fn of(numbers: &[u32]) -> Vec<String> {
        let text = format!(
            "[[mutant]]\nname = \"m\"\nfile = \"crates/verdigris-kir/src/a.rs\"\nfind = \"1\"\nreplace = \"2\"\nmistake = \"two\"\nexpect = [\"race\"]\n\
             review = {numbers:?}\nrun = {{ verify = \"x\" }}\n"
        );
        missing(&List::read(&Tree::of(&[("mutants/f.toml", &text)])).expect("reads"))
    }

    #[test]
    fn each_mistake_of_the_review_is_named_by_a_row() {
        let all: Vec<u32> = MISTAKES.iter().flat_map(|&(first, last)| first..=last).collect();
        assert!(of(&all).is_empty());
        assert_eq!(of(&all[1..]), ["no mutant is mistake 1 of the review: a row names it by `review`"]);
        let with = |number: u32| of(&[&all[..], &[number]].concat());
        assert_eq!(with(19), ["mutant f/m: number 19 of the review is no mistake"]);
        assert_eq!(with(29), ["mutant f/m: the review has no number 29"]);
    }

    #[test]
    fn what_is_no_mistake_is_not_among_them() {
        let is_mistake = |number: u32| MISTAKES.iter().any(|&(first, last)| (first..=last).contains(&number));
        assert!(NO_MISTAKES.iter().all(|&(number, why)| !is_mistake(number) && !why.is_empty()));
    }
}
