//! The rule `words`: what `GLOSSARY.md` bans is written nowhere, and no word has two rows.

use std::collections::HashMap;

use super::Finding;
use crate::tree::Tree;

const GLOSSARY: &str = "GLOSSARY.md";

/// Names that keep an avoided word, for ids are for ever: plan caches, records and cases speak them. They are left out before a text is
/// read.
const NAMES: &[(&str, &str)] = &[
    ("conv.unfolded", "the id of an engine"),
    ("conv_unfold", "the name of its kernels"),
    ("conv_add_parts", "the name of the kernels of the split-K reduction"),
];

/// Files that speak of other things by an avoided word, and why.
const PLACES: &[(&str, &str, &str)] = &[
    ("crates/verdigris-engines/src/conv/halo/pixels/kernel.rs", "slab", "names of shared memory, which are part of a kernel's text"),
    ("crates/verdigris-engines/src/conv/halo/filter/kernel.rs", "slab", "names of shared memory, which are part of a kernel's text"),
    ("crates/verdigris-engines/src/conv/implicit_gemm/producer.rs", "slab", "names of shared memory, which are part of a kernel's text"),
    ("docs/python.md", "unfold", "a function that has PyTorch's name"),
];

/// Documents beside `docs/` that are held to the glossary.
const DOCUMENTS: &[&str] = &["README.md", "ARCHITECTURE.md", "DESIGN.md", "CONTRIBUTING.md"];

/// This file plants what it looks for.
const ITSELF: &str = "xtask/src/tidy/words.rs";

/// One word of a text: in lower case, with its line (from 1), and whether it follows the word before it as part of one phrase or name.
struct Word {
    text: String,
    line: usize,
    is_joined: bool,
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let Some(glossary) = tree.text(GLOSSARY) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut banned: Vec<Vec<String>> = Vec::new();
    for (index, line) in glossary.lines().enumerate() {
        let Some(cells) = cells(line) else { continue };
        for word in cells[0].split(',').map(str::trim) {
            if let Some(first) = seen.insert(word.to_lowercase(), index + 1) {
                found.push(Finding::new(
                    "words",
                    GLOSSARY,
                    index + 1,
                    format!("`{word}` has a row in line {first}: one word, one meaning"),
                ));
            }
        }
        // What stands between pairs of asterisks.
        let phrases = cells[2].split("**").skip(1).step_by(2);
        banned.extend(phrases.map(|phrase| words(phrase).into_iter().map(|word| word.text).collect::<Vec<_>>()));
    }
    for (path, text) in tree.files().filter(|(path, _)| is_held(path)) {
        let text = if path.ends_with(".rs") { without_names(text) } else { text.to_owned() };
        let text = NAMES.iter().fold(text, |text, (name, _)| text.replace(name, ""));
        let words = words(&text);
        for phrase in &banned {
            if PLACES.iter().any(|(place, word, _)| *place == path && phrase[..] == [*word]) {
                continue;
            }
            for window in words.windows(phrase.len()).filter(|window| is_phrase(window, phrase)) {
                found.push(Finding::new("words", path, window[0].line, format!("`{}`: {GLOSSARY} has the word for it", phrase.join(" "))));
            }
        }
    }
    found
}

/// Whether a file's words are those of the glossary. History, records, cases and tuned sets keep what they said.
fn is_held(path: &str) -> bool {
    let is_source = path.ends_with(".rs") && (path.starts_with("crates/") || path.starts_with("xtask/")) && path != ITSELF;
    is_source || DOCUMENTS.contains(&path) || path.starts_with("docs/") && path.ends_with(".md")
}

/// The three cells of a row of the glossary.
fn cells(line: &str) -> Option<[&str; 3]> {
    let inside = line.strip_prefix("| ")?.strip_suffix('|')?;
    let mut cells = inside.split('|').map(str::trim);
    let row = [cells.next()?, cells.next()?, cells.next()?];
    (row[0] != "word" && cells.next().is_none()).then_some(row)
}

/// A source without the strings that hold one name: ids, knobs, kernels, and what is declared in a kernel.
fn without_names(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("//") {
            kept.push_str(line);
            continue;
        }
        for (index, piece) in line.split('"').enumerate() {
            let is_name = index % 2 == 1 && !piece.contains(' ');
            kept.push_str(if is_name { "\"\"" } else { piece });
        }
    }
    kept
}

/// The words of a text, those of names in snake case and camel case one by one.
fn words(text: &str) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let (mut line, mut is_joined, mut last) = (1, false, ' ');
    let mut current = String::new();
    for c in text.chars().chain(std::iter::once(' ')) {
        let ends = !c.is_alphanumeric() || c.is_uppercase() && last.is_lowercase();
        if ends && !current.is_empty() {
            words.push(Word { text: std::mem::take(&mut current), line, is_joined });
            is_joined = true;
        }
        if c.is_alphanumeric() {
            current.extend(c.to_lowercase());
        } else {
            // A phrase goes on over the end of a line, and over the marks of a comment there.
            is_joined = is_joined && matches!(c, ' ' | '_' | '-' | '\n' | '/' | '!');
            line += usize::from(c == '\n');
        }
        last = c;
    }
    words
}

/// Whether words that stand side by side are the phrase; its last word may be a plural.
fn is_phrase(window: &[Word], phrase: &[String]) -> bool {
    let is_joined = window.iter().skip(1).all(|word| word.is_joined);
    let last = phrase.len() - 1;
    is_joined
        && window.iter().zip(phrase).enumerate().all(|(index, (word, wanted))| {
            word.text == *wanted || index == last && word.text.strip_suffix('s').is_some_and(|singular| singular == wanted)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::spoken;

    const TABLE: &str =
        "| word | meaning | avoided |\n|---|---|---|\n| TMA | copies | **copy engine** |\n| K-tile | a step | **slab**, part |\n";
    const PATH: &str = "crates/verdigris-engines/src/map.rs";

    fn found(path: &str, text: &str) -> Vec<String> {
        spoken(&check(&Tree::of(&[(GLOSSARY, TABLE), (path, text)])))
    }

    #[test]
    fn banned_words_are_found_in_comments_names_messages_and_documents() {
        for text in [
            "\n// by the copy engine",
            "\n//! Two Copy Engines.",
            "\nfn copy_engine() {}",
            "\nstruct CopyEngine;",
            "\nlet s = \"the copy engine takes 8\";",
            "\nlet slab_rows = 3;",
            "\nstruct RowSlab;",
            "\n/// all slabs",
        ] {
            assert_eq!(found(PATH, text), [format!("words {PATH}:2")], "{text}");
        }
        assert_eq!(found(PATH, "// the copy\n// engine"), [format!("words {PATH}:1")]);
        assert_eq!(found("docs/a.md", "a slab"), ["words docs/a.md:1"]);
        assert_eq!(found("README.md", "copy-engine"), ["words README.md:1"]);
    }

    #[test]
    fn other_words_names_and_places_are_free() {
        for text in ["// a copy. Engine", "fn copy(engine: u32) {}", "// part", "k.shared(\"a_slabs\")", "// slabby", "// `conv.unfolded`"]
        {
            assert_eq!(found(PATH, text), [""; 0], "{text}");
        }
        let excepted = PLACES.iter().filter(|(_, word, _)| *word == "slab").map(|(path, ..)| *path);
        for path in ["CHANGELOG.md", "cases/conv.toml", "bench/record/a.md"].into_iter().chain(excepted) {
            assert_eq!(found(path, "a slab"), [""; 0], "{path}");
        }
    }

    #[test]
    fn a_word_has_one_row() {
        let twice = "| tile | a | |\n| panel, Tile | b | |\n";
        assert_eq!(spoken(&check(&Tree::of(&[(GLOSSARY, twice)]))), ["words GLOSSARY.md:2"]);
    }

    #[test]
    fn every_exception_is_needed_and_every_ban_is_read() {
        let root = crate::tree::workspace_root().expect("tests run inside the workspace");
        let tree = Tree::read(&root).expect("the sources can be listed");
        let glossary = tree.text(GLOSSARY).expect("the glossary");
        for phrase in ["copy engine", "way out", "lies across", "add parts", "unfolded", "slab"] {
            assert!(glossary.contains(&format!("**{phrase}**")), "{phrase}");
        }
        for (path, word, _) in PLACES {
            let text = tree.text(path).unwrap_or_else(|| panic!("{path} is gone"));
            assert!(text.contains(word), "{path} no longer says {word}");
        }
    }
}
