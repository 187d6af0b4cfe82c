//! Every kernel that the library can name without a user's own chain, and every probe of the language, as text for the assembler.
//!
//! This is the one place where these commands look into the house.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use verdigris_kir::inst::Op;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::KernelRef;
use verdigris_kir::ptx::{self, Isa};
use verdigris_kir::verify::{Verified, verify};
use verdigris_probes::constructs;

use crate::ptxas::{Assembly, Barriers, Demands};

/// The language version that kernels are printed in: the newest that the pinned assembler reads.
pub(crate) const PTX_ISA: Isa = Isa::V9_0;

/// Chips whose kernels are assembled. A portable kernel is assembled for each, since the same text may need more registers on one
/// than on another; a chip in between is given only what is written for it.
pub(crate) const CHIPS: [(Target, bool); 3] = [(Target::Sm80, true), (Target::Sm89, false), (Target::Sm90a, true)];

/// All kernels of all engines, built, verified and printed for the newest language version that we print; one assembly for each
/// kernel and chip.
///
/// # Errors
/// The verifier's findings in all of them, and where a text does not say what its kernel says.
pub(crate) fn kernels() -> Result<Vec<Assembly>> {
    let (assemblies, faults) = judged("");
    if !faults.is_empty() {
        bail!("{} kernels of the catalog have faults\n{}", faults.len(), faults.join("\n"));
    }
    Ok(assemblies)
}

/// As [`kernels`], of those alone whose names contain `filter`, with those apart that the verifier refuses or whose text does not read
/// back as the kernel: the words on each.
pub(crate) fn judged(filter: &str) -> (Vec<Assembly>, Vec<String>) {
    let mut printed: BTreeMap<String, Option<(Target, Assembly)>> = BTreeMap::new();
    let (mut assemblies, mut faults) = (Vec::new(), Vec::new());
    for (chip, portable_too) in CHIPS {
        for kernel in kernels_for(chip).into_iter().filter(|kernel| kernel.name().contains(filter)) {
            let known = printed.entry(kernel.name().to_string()).or_insert_with(|| match verify(kernel.build()) {
                Ok(verified) => match assembly(kernel.name(), &verified) {
                    Ok(text) => Some((verified.target, text)),
                    Err(differs) => {
                        faults.push(format!("{differs:#}"));
                        None
                    }
                },
                Err(found) => {
                    faults.push(found.to_string());
                    None
                }
            });
            let Some((written_for, text)) = known else { continue };
            if portable_too || *written_for == chip {
                assemblies.push(Assembly { target: chip.ptx().to_string(), ..text.clone() });
            }
        }
    }
    (assemblies, faults)
}

/// What a chip can be given: the engines' catalog, and the probes, all of which are written for the last chip.
fn kernels_for(chip: Target) -> Vec<KernelRef> {
    let mut kernels = verdigris_engines::catalog(chip);
    if chip == Target::Sm90a {
        kernels.extend(constructs::all().iter().map(constructs::Probe::kernel));
    }
    kernels
}

/// The chip that the assembler calls so, of those whose kernels are assembled.
pub(crate) fn chip(name: &str) -> Result<Target> {
    let known = CHIPS.iter().map(|(chip, _)| *chip).find(|chip| chip.ptx() == name);
    known.with_context(|| format!("no kernels are assembled for `{name}`, only for {}", CHIPS.map(|(chip, _)| chip.ptx()).join(", ")))
}

/// Prints a verified kernel, for the chip that it is written for.
///
/// # Errors
/// Where the text, read back, does not say what the kernel says.
pub(crate) fn assembly(name: &str, verified: &Verified<KernelBody>) -> Result<Assembly> {
    held(name, verified, ptx::print(verified, PTX_ISA))
}

/// A kernel's text, held against the kernel.
fn held(name: &str, verified: &Verified<KernelBody>, ptx: String) -> Result<Assembly> {
    ptx::read_back(verified, &ptx, PTX_ISA).with_context(|| format!("{name}: its text does not read back"))?;
    Ok(Assembly {
        name: name.to_string(),
        target: verified.target.ptx().to_string(),
        ptx,
        allow_spill_bytes: verified.allowed_spill_bytes,
        max_registers: Some(register_budget(verified)),
        demands: Some(demands(verified)),
    })
}

/// What the assembler's report has to agree with.
fn demands(body: &KernelBody) -> Demands {
    let mut trades_registers = false;
    let (mut barriers, mut in_register) = (0, false);
    body.for_each_inst(&mut |inst| match inst.op {
        Op::Setmaxnreg { .. } => trades_registers = true,
        Op::CtaSync {} | Op::CtaCount {} | Op::CtaVote { .. } => barriers = barriers.max(1),
        Op::BarSync {} | Op::BarArrive {} => match inst.ins.first().and_then(|number| body.constant(*number)) {
            Some(number) => barriers = barriers.max(number as u32 + 1),
            None => in_register = true,
        },
        _ => {}
    });
    Demands {
        registers_at_entry: trades_registers.then(|| body.entry_registers()),
        barriers: if in_register { Barriers::AtLeast(barriers.max(1)) } else { Barriers::Counted(barriers) },
        params: body.params.iter().map(|param| (param.kind.bytes(), param.kind.alignment_bytes())).collect(),
        threads: body.threads,
    }
}

/// Registers a thread that let the kernel's CTAs stand on one SM together. An instruction can name 255 of them.
fn register_budget(body: &KernelBody) -> u32 {
    body.entry_registers().min(255)
}

/// Writes assemblies as a folder that [`crate::ptxas::read_folder`] reads back.
pub(crate) fn write_folder(assemblies: &[Assembly], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for assembly in assemblies {
        let mut text = format!("// assemble-for: {}\n// allow-spill-bytes: {}\n", assembly.target, assembly.allow_spill_bytes);
        if let Some(max_registers) = assembly.max_registers {
            text.push_str(&format!("// max-registers: {max_registers}\n"));
        }
        text.push_str(&assembly.ptx);
        let path = folder.join(format!("{}.{}.ptx", assembly.name, assembly.target));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use verdigris_kir::face::{Header, Kernel, Val, build};

    use super::*;

    fn relu() -> KernelRef {
        KernelRef::new("relu", || {
            let header = Header { name: "relu".into(), target: Target::Sm80, threads: 256, min_ctas: 4, ..Header::default() };
            build(header, |k| {
                let x = k.input("x", 4);
                let y = k.output("y", 4);
                let elements = k.scalar::<u32>("elements");
                let i = k.cta() * 256 + k.thread();
                k.when(i.lt(elements), || {
                    let value = k.ld_global::<f32>(x.at(i, 4), 0);
                    k.st_global(y.at(i, 4), 0, value.max(0.0));
                });
            })
        })
    }

    #[test]
    fn a_kernel_goes_all_the_way_to_the_assembler() {
        let assembly = assembly("relu", &verify(relu().build()).expect("a kernel without faults")).expect("reads back");
        assert_eq!((assembly.name.as_str(), assembly.target.as_str()), ("relu", "sm_80"));
        assert_eq!((assembly.allow_spill_bytes, assembly.max_registers), (0, Some(64)));
        let root = crate::tree::workspace_root().expect("tests run inside the workspace");
        let Some(toolchain) = crate::ptxas::Toolchain::installed(&root) else {
            eprintln!("skipped: no assembler here; `cargo xtask ptxas --install` fetches it");
            return;
        };
        let outcomes = crate::ptxas::assemble_all(&toolchain, None, &[assembly], 1).expect("ptxas can be run");
        assert_eq!(outcomes[0].failures, [""; 0]);
        assert_eq!(outcomes[0].entries.len(), 1);
    }

    #[test]
    fn a_text_that_says_something_else_is_refused_with_its_name_and_line() {
        let verified = verify(relu().build()).expect("a kernel without faults");
        let printed = ptx::print(&verified, PTX_ISA);
        let changed = printed.replacen("max.f32", "min.f32", 1);
        assert_ne!(changed, printed);
        let said = format!("{:#}", held("relu", &verified, changed).expect_err("a minimum is no maximum"));
        assert!(said.starts_with("relu: its text does not read back: line ") && said.contains("FMin"), "{said}");
    }

    #[test]
    fn demands_are_what_the_kernel_says() {
        let demands = demands(&relu().build());
        assert_eq!(demands.params, [(8, 8), (8, 8), (4, 4)]);
        assert_eq!((demands.threads, demands.registers_at_entry), (256, None));
        assert_eq!(demands.barriers, Barriers::Counted(0));
        let named = |number: &dyn Fn(Kernel<'_>) -> Val<'_, u32>| {
            let header = Header { name: "named".into(), target: Target::Sm80, threads: 64, ..Header::default() };
            super::demands(&build(header, |k| k.barrier_sync(number(k), 64))).barriers
        };
        assert_eq!(named(&|k| k.constant(3)), Barriers::Counted(4));
        assert_eq!(named(&|k| k.warp()), Barriers::AtLeast(1));
    }

    #[test]
    fn a_folder_keeps_text_and_allowances() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let written = Assembly {
            name: "gemm".to_string(),
            target: "sm_90a".to_string(),
            ptx: ".version 9.0\n.target sm_80\n".to_string(),
            allow_spill_bytes: 8,
            max_registers: Some(168),
            demands: None,
        };
        write_folder(std::slice::from_ref(&written), folder.path()).expect("writable");
        let read = crate::ptxas::read_folder(folder.path()).expect("readable");
        assert_eq!(read.len(), 1);
        assert!(read[0].ptx.ends_with(&written.ptx));
        assert_eq!(Assembly { ptx: written.ptx.clone(), ..read[0].clone() }, written);
    }

    #[test]
    fn names_are_unique_on_each_chip() {
        for (chip, _) in CHIPS {
            let mut seen = BTreeSet::new();
            for kernel in kernels_for(chip) {
                assert!(seen.insert(kernel.name().to_string()), "two kernels are called `{}`", kernel.name());
            }
        }
    }
}
