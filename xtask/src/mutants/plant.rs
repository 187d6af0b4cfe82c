//! Planting: where each mutant stands in its source, and the source with all of them, each behind a switch.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, bail};

use super::list::{List, Mutant, switch_of};
use crate::tree::Tree;

/// The module that knows which mutant is on, and where it goes.
const SWITCH: &str = include_str!("../../mutants/mutant.rs");
const SWITCH_PATH: &str = "crates/verdigris-kir/src/mutant.rs";
const SWITCH_HOST: &str = "crates/verdigris-kir/src/lib.rs";

/// Where a mutant stands: bytes of its source.
///
/// # Errors
/// A text that is not there any more, or stands there twice.
pub(super) fn place(tree: &Tree, mutant: &Mutant) -> Result<Range<usize>> {
    let entry = &mutant.entry;
    let text = tree.text(&entry.file).with_context(|| format!("mutant {}: {} is not there", mutant.id, entry.file))?;
    let once = |find: &str| match text.matches(find).count() {
        1 => Ok(text.find(find).unwrap_or_default()),
        count => bail!("mutant {}: this stands {count} times in {}, and has to stand there once:\n{find}", mutant.id, entry.file),
    };
    let start = match &entry.after {
        None => once(&entry.find)?,
        Some(after) => {
            let from = once(after)? + after.len();
            let behind = text[from..].find(&entry.find);
            from + behind
                .with_context(|| format!("mutant {}: in {} this does not stand behind `{after}`:\n{}", mutant.id, entry.file, entry.find))?
        }
    };
    if let Some(why) = torn(&text[..start], &entry.find) {
        bail!("mutant {}: in {} its text {why}:\n{}", mutant.id, entry.file, entry.find);
    }
    Ok(start..start + entry.find.len())
}

/// Why a text cannot stand in a branch, as far as it and what stands before it tell; only the compiler knows all of it.
fn torn(before: &str, find: &str) -> Option<&'static str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let behind_name = find.trim_start_matches(is_name);
    if find.starts_with('.') || (before.ends_with('.') && !before.ends_with("..")) {
        return Some("is what is called on an expression, and has to hold that as well");
    }
    if behind_name.len() < find.len() && behind_name.starts_with(": ") {
        return Some("is a field, and has to be its value, or the whole expression");
    }
    let line = before.rsplit('\n').next().unwrap_or_default().trim();
    if find.ends_with(';') && !(line.is_empty() || line.ends_with(['{', '}', ';'])) {
        return Some("ends a statement that begins before it");
    }
    None
}

/// The sources that change, with all mutants in them.
///
/// # Errors
/// A mutant without a place, or two of which one begins in the other and ends behind it.
pub(super) fn all(tree: &Tree, list: &List) -> Result<BTreeMap<String, String>> {
    let mut by_file: BTreeMap<&str, Vec<Spot<'_>>> = BTreeMap::new();
    for mutant in &list.mutants {
        by_file.entry(&mutant.entry.file).or_default().push(Spot { range: place(tree, mutant)?, mutant });
    }
    let mut planted = BTreeMap::new();
    for (file, mut spots) in by_file {
        spots.sort_by_key(|spot| (spot.range.start, usize::MAX - spot.range.end, &spot.mutant.id));
        for pair in spots.windows(2) {
            let [first, second] = [&pair[0], &pair[1]];
            if second.range.start < first.range.end && second.range.end > first.range.end {
                bail!("the mutants {} and {} overlap in {file}: neither holds the other", first.mutant.id, second.mutant.id);
            }
        }
        let text = tree.text(file).unwrap_or_default();
        planted.insert(file.to_owned(), emit(text, 0..text.len(), &spots, switch_of(file)?));
    }
    for not_const in &list.not_const {
        let file = &not_const.file;
        let text = match planted.get(file) {
            Some(text) => text.clone(),
            None => tree.text(file).with_context(|| format!("`not_const` names {file}, which is not there"))?.to_owned(),
        };
        let plain = not_const.find.replacen("const ", "", 1);
        if plain == not_const.find || !text.contains(&not_const.find) {
            bail!("`not_const`: in {file} there is no constant function with this head:\n{}", not_const.find);
        }
        planted.insert(file.clone(), text.replace(&not_const.find, &plain));
    }
    let host = planted.get(SWITCH_HOST).map(String::as_str).or_else(|| tree.text(SWITCH_HOST));
    let host = host.with_context(|| format!("{SWITCH_HOST} is not there"))?;
    planted.insert(SWITCH_HOST.to_owned(), format!("{host}\npub mod mutant;\n"));
    planted.insert(SWITCH_PATH.to_owned(), SWITCH.to_owned());
    Ok(planted)
}

struct Spot<'m> {
    range: Range<usize>,
    mutant: &'m Mutant,
}

/// The text of a range with the mutants in it: those of one place behind one another, those inside of another's text in there.
fn emit(text: &str, range: Range<usize>, spots: &[Spot<'_>], switch: &str) -> String {
    let mut out = String::new();
    let (mut at, mut rest) = (range.start, spots);
    while let Some(first) = rest.first() {
        let same = rest.iter().take_while(|spot| spot.range == first.range).count();
        let inside = rest[same..].iter().take_while(|spot| spot.range.start < first.range.end).count();
        out.push_str(&text[at..first.range.start]);
        let original = emit(text, first.range.clone(), &rest[same..same + inside], switch);
        out.push_str(&switched(&rest[..same], &original, switch));
        at = first.range.end;
        rest = &rest[same + inside..];
    }
    out.push_str(&text[at..range.end]);
    out
}

/// A text, and the texts that take its place.
fn switched(spots: &[Spot<'_>], original: &str, switch: &str) -> String {
    let branches: String =
        (spots.iter()).map(|Spot { mutant, .. }| format!("if {switch}({}) {{ {} }} else ", mutant.number, mutant.entry.replace)).collect();
    let whole = format!("{branches}{{ {original} }}");
    // Statements stay statements; what stands within an expression must not be torn by its neighbours.
    if original.trim_end().ends_with(';') { whole } else { format!("({whole})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "fn f() {\n    first(1);\n    second(1 + g(2));\n    second(1);\n}\n";

    fn planted(mutants: &[(&str, &str, &str)]) -> Result<String> {
        let entry = |(number, (after, find, replace)): (usize, &(&str, &str, &str))| {
            let after = if after.is_empty() { String::new() } else { format!("after = \"{after}\"\n") };
            format!(
                "[[mutant]]\nname = \"{number}\"\nfile = \"crates/verdigris-engines/src/a.rs\"\n{after}find = \"{find}\"\nreplace = \"{replace}\"\n\
                 mistake = \"wrong\"\nexpect = [\"numbers\"]\nrun = {{ verify = \"x\" }}\n"
            )
        };
        let lists: String = mutants.iter().enumerate().map(entry).collect();
        let tree = Tree::of(&[("mutants/a.toml", &lists), ("crates/verdigris-engines/src/a.rs", SOURCE), (SWITCH_HOST, "pub mod face;\n")]);
        let list = List::read(&tree)?;
        let mut files = all(&tree, &list)?;
        assert!(files[SWITCH_HOST].ends_with("pub mod mutant;\n") && files.contains_key(SWITCH_PATH));
        let mut text = files.remove("crates/verdigris-engines/src/a.rs").expect("changes");
        for (number, mutant) in list.mutants.iter().enumerate() {
            text = text.replace(&format!("verdigris_kir::mutant::is({})", mutant.number), &format!("is({number})"));
        }
        Ok(text)
    }

    #[test]
    fn statements_and_expressions_stand_behind_their_switch() {
        let text = planted(&[("", "first(1);", ""), ("second(1 + ", "g(2)", "g(3)")]).expect("fits");
        assert!(text.contains("    if is(0) {  } else { first(1); }\n"), "{text}");
        assert!(text.contains("second(1 + (if is(1) { g(3) } else { g(2) }));"), "{text}");
    }

    #[test]
    fn mutants_of_one_place_and_in_one_another_are_all_planted() {
        let text = planted(&[("", "1 + g(2)", "1"), ("", "1 + g(2)", "0"), ("1 + ", "g(2)", "g(3)")]).expect("fits");
        assert!(text.contains("(if is(0) { 1 } else if is(1) { 0 } else { 1 + (if is(2) { g(3) } else { g(2) }) })"), "{text}");
    }

    #[test]
    fn texts_that_no_branch_can_hold_are_named() {
        assert_eq!(torn("    ", "first(1);"), None);
        assert_eq!(torn("k.when(x, || { ", "first(1);"), None);
        assert_eq!(torn("let x = ", "a::<u8>(1)"), None);
        assert_eq!(torn("1..", "a.b()"), None);
        assert!(torn("let x = ", "first(1);").is_some_and(|why| why.contains("begins before it")));
        assert!(torn("a.", "first(1)").is_some() && torn("a", ".first(1)").is_some());
        assert!(torn("P { ", "first: 1, second: 2").is_some_and(|why| why.contains("a field")));
    }

    #[test]
    fn mutants_that_do_not_fit_are_named() {
        let told = |mutants: &[(&str, &str, &str)]| format!("{:#}", planted(mutants).expect_err("does not fit"));
        assert!(told(&[("", "third();", "")]).contains("mutant a/0: this stands 0 times in crates/verdigris-engines/src/a.rs"));
        assert!(told(&[("", "second(1", "")]).contains("stands 2 times"));
        assert!(told(&[("second(1);", "first(1);", "")]).contains("does not stand behind `second(1);`"));
        assert!(told(&[("", "first(1);\\n    second", "x"), ("", "second(1 + g", "y")]).contains("a/0 and a/1 overlap"));
    }
}
