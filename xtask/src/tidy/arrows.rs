//! Arrows between the modules of one crate, where Cargo cannot see them.
//!
//! In `kir`: `tile` is built from `face` alone, `face` does not know `tile`, and the three readers of a
//! kernel (`verify`, `ptx`, `interp`) know neither, for they must judge any kernel however it was written.
//! In `engines`, two levels deep: what families share are rooms in an order, each of which knows those before it and no family. Families do
//! not import each other, and of a family's engines none imports another: what they share is a room of the family.
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

/// Modules of `engines` that belong to no family, in their order: each may import those before it.
const ROOMS: &[&str] = &["arch", "cost", "engine", "algorithm", "layout", "fuse", "terms", "sums", "store", "split_k", "hopper"];

/// Rooms of a family, which its engines share: in their order, as above.
const FAMILY_ROOMS: &[(&str, &[&str])] = &[
    (
        "attention",
        &[
            "half",
            "tile",
            "descale",
            "mapped",
            "order",
            "paged",
            "ragged",
            "band",
            "sequences",
            "blocks",
            "softmax",
            "of_queries",
            "combine",
            "score_mod",
            "sinks",
            "function",
            "dropout",
            "testing",
        ],
    ),
    ("conv", &["geometry", "in_lines", "in_patches"]),
    ("gemm", &["factors"]),
    ("norm", &["walk"]),
    ("pool", &["axis", "tensor", "whole_windows"]),
    ("reduce", &["plain"]),
];

/// Families above others, and those others: rewritings of one family's problems as another's. They may import its root and its rooms.
const ABOVE: &[(&str, &[&str])] = &[("rewrite", &["conv", "gemm", "map", "pool", "reduce"])];

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
        let Some((_, law, reason)) = KIR_LAWS.iter().find(|(from, _, _)| *from == arrow.from[0]) else {
            continue;
        };
        let breaks = match law {
            Law::Only { whole, words, not } => {
                let (to, name) = (arrow.to[0].as_str(), arrow.to.get(1).map_or("*", String::as_str));
                let is_word = words.contains(&to) && !not.contains(&name);
                !whole.contains(&to) && !is_word
            }
            Law::Never(banned) => banned.contains(&arrow.to[0].as_str()),
        };
        if breaks {
            let message = format!("`{}` imports `{}`: {reason}", arrow.from[0], arrow.to[0]);
            found.push(Finding::new("arrows", arrow.path, arrow.line, message));
        }
    }
    found
}

fn engines(tree: &Tree) -> Vec<Finding> {
    let house = Crate::read(tree, ENGINES);
    // What stands in a family: its engines and its rooms.
    let inside: BTreeSet<&[String]> = house.files.iter().filter_map(|(_, module, _)| module.get(..2)).collect();
    let rooms_of = |family: &str| FAMILY_ROOMS.iter().find(|(name, _)| *name == family).map_or(&[][..], |(_, rooms)| rooms);
    let place = |rooms: &[&str], name: &str| rooms.iter().position(|room| *room == name);
    let mut found = Vec::new();
    for import in house.imports() {
        let (from, to) = (&import.from[0], &import.to[0]);
        // The engine or room of a family at either end; a glob of the family's root names them all.
        let sibling = import.to.get(..2).filter(|path| inside.contains(path) || path[1] == "*").map(|path| path[1].as_str());
        let message = if let Some(room) = place(ROOMS, from) {
            match place(ROOMS, to) {
                Some(other) if other <= room => continue,
                Some(_) => format!("the room `{from}` imports `{to}`, which stands behind it: {}", ROOMS.join(", ")),
                None => format!("`{from}` is shared by all families and imports the family `{to}`"),
            }
        } else if from == to {
            let (Some(own), Some(sibling)) = (import.from.get(1), sibling) else { continue };
            let rooms = rooms_of(from);
            match (place(rooms, own), place(rooms, sibling)) {
                _ if own == sibling => continue,
                (None, Some(_)) => continue,
                (Some(room), Some(other)) if other < room => continue,
                (Some(_), _) => format!("`{from}::{own}` is shared by the engines of `{from}` and imports `{from}::{sibling}`"),
                (None, None) => {
                    format!("the engine `{from}::{own}` imports its sibling `{from}::{sibling}`: move what they share into a room")
                }
            }
        } else if place(ROOMS, to).is_some() {
            continue;
        } else if ABOVE.iter().any(|(above, families)| above == from && families.contains(&to.as_str())) {
            match sibling {
                Some(engine) if place(rooms_of(to), engine).is_none() => {
                    format!("`{from}` imports the engine `{to}::{engine}`: it may import the root of `{to}` and its rooms")
                }
                _ => continue,
            }
        } else {
            format!("the family `{from}` imports the family `{to}`: move what they share into a room of its own")
        };
        found.push(Finding::new("arrows", import.path, import.line, message));
    }
    found
}

/// An import of a crate's module by another, or by the same; both are paths from the crate's root, and `to` ends in what is imported.
struct Import<'t> {
    path: &'t str,
    line: usize,
    from: &'t [String],
    to: &'t [String],
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

    /// Every import of a module of the crate, outside test code. A name that the crate root re-exports counts as an import of the module
    /// that it comes from.
    fn imports(&self) -> Vec<Import<'_>> {
        let mut imports = Vec::new();
        for (path, module, source) in &self.files {
            let is_test = (1..=module.len()).any(|n| self.test_modules.contains(&module[..n]));
            if is_test || module.is_empty() {
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
                if target.first().is_some_and(|to| self.modules.contains(to)) {
                    imports.push(Import { path, line: named.line, from: module, to: target });
                }
            }
        }
        imports
    }

    /// Those between two different top-level modules.
    fn arrows(&self) -> impl Iterator<Item = Import<'_>> {
        self.imports().into_iter().filter(|import| import.from[0] != import.to[0])
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
        let mut files: Vec<String> =
            ["engine.rs", "layout/batch.rs", "fuse/epilogue.rs", "store/mod.rs", "conv/mod.rs", "conv/geometry/mod.rs"]
                .into_iter()
                .chain(["conv/halo/mod.rs", "gemm/mod.rs", "gemm/factors.rs", "gemm/simt.rs", "gemm/wgmma/mod.rs", "softmax.rs"])
                .map(|file| format!("{ENGINES}{file}"))
                .collect();
        files.retain(|other| *other != path);
        let root = format!("{ENGINES}lib.rs");
        let mut texts: Vec<(&str, &str)> = files.iter().map(|file| (file.as_str(), "")).collect();
        texts.extend([(root.as_str(), "use crate::gemm::ENGINES;"), (path.as_str(), text)]);
        spoken(&check(&Tree::of(&texts)))
    }

    #[test]
    fn families_do_not_know_each_other() {
        for (file, text) in [
            ("conv/winograd.rs", "use crate::softmax::go;"),
            ("conv/winograd.rs", "use crate::gemm::wgmma;"),
            ("conv/winograd.rs", "use crate::gemm::factors::Factors;"),
            ("fuse/mainloop.rs", "use crate::gemm::Spec;"),
            ("fuse/mainloop.rs", "use crate::conv::geometry::Tile;"),
            ("engine.rs", "use crate::softmax::go;"),
            ("rewrite/im2col.rs", "use crate::softmax::go;"),
        ] {
            assert_eq!(engines(file, text), [format!("arrows {ENGINES}{file}:1")], "{file}: {text}");
        }
    }

    #[test]
    fn engines_of_a_family_do_not_know_each_other() {
        for (file, text) in [
            ("conv/winograd.rs", "use super::halo::go;"),
            ("conv/winograd/kernel.rs", "use super::super::halo::{Tile, cuts};"),
            ("conv/winograd/mod.rs", "fn f() { crate::conv::halo::go() }"),
            ("conv/winograd.rs", "use super::*;"),
            ("gemm/simt.rs", "use crate::gemm::wgmma;"),
            // A room of the family does not look at its engines, nor a family above another at that one's.
            ("conv/geometry/boxes.rs", "use crate::conv::halo::Tile;"),
            ("rewrite/im2col.rs", "use crate::conv::halo::Tile;"),
        ] {
            let found: BTreeSet<String> = engines(file, text).into_iter().collect();
            assert_eq!(found, BTreeSet::from([format!("arrows {ENGINES}{file}:1")]), "{file}: {text}");
        }
    }

    #[test]
    fn rooms_stand_in_an_order() {
        for (file, text) in [("layout/repack.rs", "use crate::fuse::epilogue;"), ("fuse/epilogue.rs", "use crate::store::Store;")] {
            assert_eq!(engines(file, text), [format!("arrows {ENGINES}{file}:1")], "{file}: {text}");
        }
    }

    #[test]
    fn families_use_rooms_and_what_is_their_own() {
        for (file, text) in [
            ("conv/winograd.rs", "use crate::{engine::Engine, fuse::epilogue};"),
            ("conv/winograd.rs", "use super::geometry::Tile; use super::empty_program;"),
            ("conv/winograd/kernel.rs", "use super::tile::Tile; use super::*;"),
            ("conv/mod.rs", "use crate::conv::halo::Halo;"),
            ("gemm/simt.rs", "use super::Spec; use super::factors::Factors; use crate::gemm::simt;"),
            ("store/mod.rs", "use crate::{fuse::epilogue, layout::batch};"),
            ("rewrite/im2col.rs", "use crate::gemm; use crate::gemm::HOPPER; use crate::conv::geometry::Tile;"),
            ("conv/winograd.rs", "#[cfg(test)]\nmod tests { use crate::conv::halo::Tile; }"),
        ] {
            assert_eq!(engines(file, text), [""; 0], "{file}: {text}");
        }
    }
}
