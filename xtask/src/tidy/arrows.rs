//! Arrows between the modules of one crate, where Cargo cannot see them.
//!
//! In `kir`: `tile` is built from `face` alone, `face` does not know `tile`, and the three readers of a
//! kernel (`verify`, `ptx`, `interp`) know neither, for they must judge any kernel however it was written.
//! In `engines`: families do not import each other, and what families share does not import a family.
//! Test code is free: a verifier's test has to build the kernel that it judges.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use crate::source::{self, Source};
use crate::tree::Tree;

const KIR: &str = "crates/verdigris-kir/src/";
const ENGINES: &str = "crates/verdigris-engines/src/";

/// What a module of `kir` may or may not import from its own crate.
enum Law {
    /// Only `whole`, itself, and of the modules `words` single names, none of them in `not`.
    Only { whole: &'static [&'static str], words: &'static [&'static str], not: &'static [&'static str] },
    /// Anything but these.
    Never(&'static [&'static str]),
}

const KIR_LAWS: &[(&str, Law, &str)] = &[
    (
        "tile",
        Law::Only {
            whole: &["face", "params"],
            // Element types, orders, shapes of instructions: the words in which the face is spoken to. And arguments of a
            // launch, for a schedule knows both its parameters and what the host passes for them; and lists that a program declares.
            words: &["ir", "inst", "program", "execution"],
            // With these a module could record an instruction past the face.
            not: &["Op", "Inst", "Stmt", "Block", "Operand", "Reg", "KernelBody", "*"],
        },
        "tile is built from face alone, so whatever a tile does a kernel can also say by hand",
    ),
    ("face", Law::Never(&["tile"]), "face is the lower layer of the language"),
    ("verify", Law::Never(&["face", "tile"]), "a reader of kernels must not depend on how they were written"),
    ("ptx", Law::Never(&["face", "tile"]), "a reader of kernels must not depend on how they were written"),
    ("interp", Law::Never(&["face", "tile"]), "a reader of kernels must not depend on how they were written"),
];

/// Modules of `engines` that belong to no family.
const SHARED: &[&str] = &["algorithm", "arch", "engine", "fuse", "layout", "split_k", "store", "sums"];

/// Modules of `engines` that list the families, and therefore know them all.
const LISTS: &[&str] = &["catalog"];

/// What one family may import from another: the parts of matrix multiplication, on which others stand.
const LENT: &[(&str, &str)] = &[("gemm", "parts")];

/// Rooms of `engines` above some families, and those families: rewritings of one family's problems as another's.
const ABOVE: &[(&str, &[&str])] = &[("rewrite", &["conv", "gemm"])];

/// The rule `arrows`.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = kir(tree);
    found.extend(engines(tree));
    found
}

fn kir(tree: &Tree) -> Vec<Finding> {
    let house = Crate::read(tree, KIR);
    let mut found = Vec::new();
    for arrow in house.arrows() {
        let Some((_, law, reason)) = KIR_LAWS.iter().find(|(from, _, _)| *from == arrow.from) else {
            continue;
        };
        let breaks = match law {
            Law::Only { whole, words, not } => {
                let name = arrow.second.as_deref().unwrap_or("*");
                let word = words.contains(&arrow.to.as_str()) && !not.contains(&name);
                !whole.contains(&arrow.to.as_str()) && !word
            }
            Law::Never(banned) => banned.contains(&arrow.to.as_str()),
        };
        if breaks {
            let message = format!("`{}` imports `{}`: {reason}", arrow.from, arrow.to);
            found.push(Finding::new("arrows", arrow.path, arrow.line, message));
        }
    }
    found
}

fn engines(tree: &Tree) -> Vec<Finding> {
    let house = Crate::read(tree, ENGINES);
    let mut found = Vec::new();
    for arrow in house.arrows() {
        if SHARED.contains(&arrow.to.as_str()) || LISTS.contains(&arrow.from.as_str()) {
            continue;
        }
        if ABOVE.iter().any(|(room, families)| *room == arrow.from && families.contains(&arrow.to.as_str())) {
            continue;
        }
        let lent = LENT.iter().any(|(family, part)| *family == arrow.to && arrow.second.as_deref() == Some(*part));
        if SHARED.contains(&arrow.from.as_str()) {
            let message = format!("`{}` is shared by all families and imports the family `{}`", arrow.from, arrow.to);
            found.push(Finding::new("arrows", arrow.path, arrow.line, message));
        } else if !lent {
            let message =
                format!("the family `{}` imports the family `{}`: move what they share into a room of its own", arrow.from, arrow.to);
            found.push(Finding::new("arrows", arrow.path, arrow.line, message));
        }
    }
    found
}

/// An import from one top-level module of a crate to another.
struct Arrow<'t> {
    path: &'t str,
    line: usize,
    from: String,
    to: String,
    /// The segment after `to`, if any.
    second: Option<String>,
}

struct Crate<'t> {
    files: Vec<(&'t str, Vec<String>, Source)>,
    modules: BTreeSet<String>,
    /// Names that the crate root re-exports, with the path that they stand for.
    exported: BTreeMap<String, Vec<String>>,
    test_modules: BTreeSet<Vec<String>>,
}

impl<'t> Crate<'t> {
    fn read(tree: &'t Tree, folder: &'static str) -> Self {
        let mut files = Vec::new();
        let mut modules = BTreeSet::new();
        let mut exported = BTreeMap::new();
        let mut test_modules = BTreeSet::new();
        for (path, text) in tree.rust_under(folder) {
            let module = source::module_of(&path[folder.len()..]);
            let source = source::read(text, &module);
            modules.extend(module.first().cloned());
            test_modules.extend(source.test_modules.iter().cloned());
            if module.is_empty() {
                for named in source.named.iter().filter(|named| named.in_use) {
                    // In the root, `use face::Val` and `use crate::face::Val` are the same.
                    let inside = match named.path.first().map(String::as_str) {
                        Some("crate") => &named.path[1..],
                        _ => &named.path[..],
                    };
                    let name = named.alias.as_ref().or(inside.last());
                    if let Some(name) = name {
                        exported.insert(name.clone(), inside.to_vec());
                    }
                }
            }
            files.push((path, module, source));
        }
        Self { files, modules, exported, test_modules }
    }

    /// Every import between two different top-level modules, outside test code. A name that the crate
    /// root re-exports counts as an import of the module that it comes from.
    fn arrows(&self) -> Vec<Arrow<'t>> {
        let mut arrows = Vec::new();
        for (path, module, source) in &self.files {
            let Some(from) = module.first() else {
                continue;
            };
            let is_test = (1..=module.len()).any(|n| self.test_modules.contains(&module[..n]));
            if is_test {
                continue;
            }
            for named in source.named.iter().filter(|named| !named.in_test) {
                let [first, inside @ ..] = named.path.as_slice() else {
                    continue;
                };
                let (true, Some(head)) = (first == "crate", inside.first()) else {
                    continue;
                };
                let target = if self.modules.contains(head) {
                    inside
                } else {
                    match self.exported.get(head) {
                        Some(behind) => behind,
                        None => continue, // a macro or an item of the root itself
                    }
                };
                let Some(to) = target.first().filter(|to| self.modules.contains(*to)) else {
                    continue;
                };
                if to != from {
                    arrows.push(Arrow { path, line: named.line, from: from.clone(), to: to.clone(), second: target.get(1).cloned() });
                }
            }
        }
        arrows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::spoken;

    fn kir(file: &str, text: &str) -> Vec<String> {
        let path = format!("{KIR}{file}");
        let found = check(&Tree::of(&[
            (&format!("{KIR}lib.rs"), "pub use face::value::Val;\npub use ir::Block;"),
            (&format!("{KIR}ir.rs"), ""),
            (&format!("{KIR}inst.rs"), ""),
            (&format!("{KIR}ptx/mod.rs"), ""),
            (&format!("{KIR}face/value.rs"), ""),
            (&format!("{KIR}tile/mod.rs"), ""),
            (&path, text),
        ]));
        spoken(&found)
    }

    #[test]
    fn tile_may_use_face_and_itself() {
        let text = "use crate::face::Val;\nuse super::ring::Ring;\nuse crate::tile::shape;\nuse crate::ir::{Ty, MapDecl};\nuse crate::Val;\nuse std::fmt;";
        assert_eq!(kir("tile/map.rs", text), [""; 0]);
    }

    #[test]
    fn tile_may_use_nothing_else() {
        let expected = [format!("arrows {KIR}tile/map.rs:2")];
        for text in [
            "\nuse crate::inst::Op;",
            "\nuse crate::Block;",
            "\nuse super::super::ir::Stmt;",
            "\nfn f() { crate::ptx::go() }",
            "\nuse crate::{face::Val, ir};",
            "\nuse crate::ir::*;",
            "\nuse crate::ir;",
        ] {
            assert_eq!(kir("tile/map.rs", text), expected, "{text}");
        }
    }

    #[test]
    fn the_layers_below_do_not_look_up() {
        for (file, text) in [
            ("face/flow.rs", "use crate::tile::Ring;"),
            ("verify/sync.rs", "use crate::tile::Ring;"),
            ("verify.rs", "use crate::face::Val;"),
            ("ptx/print.rs", "use super::super::face::Val;"),
            ("interp/step.rs", "use crate::Val;"),
        ] {
            assert_eq!(kir(file, text), [format!("arrows {KIR}{file}:1")]);
        }
        assert_eq!(kir("interp/step.rs", "use crate::ir::Body;"), [""; 0]);
    }

    #[test]
    fn test_code_may_build_kernels() {
        let inline = "#[cfg(test)]\nmod tests { use crate::face::Val; }";
        assert_eq!(kir("verify/sync.rs", inline), [""; 0]);
        let found = check(&Tree::of(&[
            (&format!("{KIR}face.rs"), ""),
            (&format!("{KIR}interp/mod.rs"), "#[cfg(test)]\nmod probes;\nmod real;"),
            (&format!("{KIR}interp/probes.rs"), "use crate::face::Val;"),
            (&format!("{KIR}interp/real.rs"), "use crate::face::Val;"),
        ]));
        assert_eq!(spoken(&found), [format!("arrows {KIR}interp/real.rs:1")]);
    }

    fn engines(file: &str, text: &str) -> Vec<String> {
        let path = format!("{ENGINES}{file}");
        let found = check(&Tree::of(&[
            (&format!("{ENGINES}lib.rs"), "use crate::gemm::ENGINES;"),
            (&format!("{ENGINES}engine.rs"), ""),
            (&format!("{ENGINES}fuse/epilogue.rs"), ""),
            (&format!("{ENGINES}gemm/mod.rs"), ""),
            (&format!("{ENGINES}gemm/parts.rs"), ""),
            (&format!("{ENGINES}softmax.rs"), ""),
            (&path, text),
        ]));
        spoken(&found)
    }

    #[test]
    fn families_do_not_know_each_other() {
        for (file, text) in [
            ("conv/winograd.rs", "use crate::softmax::go;"),
            ("conv/winograd.rs", "use crate::gemm::wgmma;"),
            ("fuse/mainloop.rs", "use crate::gemm::Spec;"),
            ("fuse/mainloop.rs", "use crate::gemm::parts::Tile;"),
            ("engine.rs", "use crate::softmax::go;"),
            ("rewrite/im2col.rs", "use crate::softmax::go;"),
        ] {
            assert_eq!(engines(file, text), [format!("arrows {ENGINES}{file}:1")]);
        }
    }

    #[test]
    fn families_use_what_is_shared_and_what_gemm_lends() {
        for (file, text) in [
            ("conv/winograd.rs", "use crate::{engine::Engine, fuse::epilogue};"),
            ("conv/winograd.rs", "use crate::gemm::parts::Tile;"),
            ("gemm/wgmma.rs", "use super::Spec; use crate::gemm::simt;"),
            ("catalog.rs", "use crate::{gemm, softmax};"),
            ("rewrite/im2col.rs", "use crate::gemm;"),
        ] {
            assert_eq!(engines(file, text), [""; 0], "{file}: {text}");
        }
    }
}
