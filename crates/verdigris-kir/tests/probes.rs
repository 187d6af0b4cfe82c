//! The probes, each verified, assembled and run against plain loops in f64.

#[path = "probes/attention.rs"]
mod attention;
#[path = "probes/exchange.rs"]
mod exchange;
#[path = "probes/harness.rs"]
mod harness;
#[path = "probes/product.rs"]
mod product;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use verdigris_kir::ir::{Access, KernelBody, MapDecl, MapType, Swizzle};
use verdigris_kir::probes;
use verdigris_kir::program::{Address, Fill, L2Promotion, MapSpec, Program};
use verdigris_kir::ptx::{self, Isa};
use verdigris_kir::tile::table;
use verdigris_kir::verify;

#[test]
fn every_probe_is_verified_and_nothing_in_it_is_forgotten() {
    let mut names = BTreeSet::new();
    for probe in probes::all() {
        let body = (probe.build)();
        assert!(names.insert(body.name.clone()), "two probes are called {}", body.name);
        assert_eq!(probe.kernel().name(), body.name);
        assert_eq!(body.allowed_spill_bytes, 0, "{}", probe.name);
        if let Err(faults) = verify::verify(body) {
            panic!("{faults}");
        }
    }
}

/// The assembler, and the disassembler beside it.
fn toolchain() -> Result<(PathBuf, PathBuf), String> {
    let ptxas = match std::env::var_os("VERDIGRIS_PTXAS") {
        Some(path) => PathBuf::from(path),
        None => {
            let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv-ptx/lib");
            let pythons =
                std::fs::read_dir(&libraries).map_err(|_| "VERDIGRIS_PTXAS is not set and .venv-ptx does not exist".to_string())?;
            let mut found = pythons.flatten().map(|python| python.path().join("site-packages/nvidia/cu13/bin/ptxas"));
            found.find(|path| path.is_file()).ok_or_else(|| format!("no ptxas under {}", libraries.display()))?
        }
    };
    let nvdisasm = ptxas.with_file_name("nvdisasm");
    match (ptxas.is_file(), nvdisasm.is_file()) {
        (true, true) => Ok((ptxas, nvdisasm)),
        _ => Err(format!("{} or {} is no file", ptxas.display(), nvdisasm.display())),
    }
}

/// What the assembler says, and the machine code as text.
fn assemble(tools: &(PathBuf, PathBuf), body: KernelBody) -> (String, String) {
    let name = body.name.clone();
    let verified = verify::verify(body).expect("kernels are free of faults");
    let stem = std::env::temp_dir().join(format!("verdigris-probe-{}-{name}", std::process::id()));
    let (source, cubin) = (stem.with_extension("ptx"), stem.with_extension("cubin"));
    std::fs::write(&source, ptx::print(&verified, Isa::V9_0)).expect("a writable temporary folder");
    let run = |tool: &Path, args: &[&str]| {
        let output = Command::new(tool).args(args).output().expect("tools run");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
    };
    let (source_name, cubin_name) = (source.to_string_lossy().into_owned(), cubin.to_string_lossy().into_owned());
    let (assembled, words) = run(&tools.0, &["-v", "-arch=sm_90a", "-o", &cubin_name, &source_name]);
    assert!(assembled, "{name}: {words}");
    let (shown, code) = run(&tools.1, &["-c", &cubin_name]);
    assert!(shown, "{name}: {code}");
    let _ = std::fs::remove_file(source);
    let _ = std::fs::remove_file(cubin);
    (words, code)
}

#[test]
fn every_probe_assembles_without_spills_and_without_serialized_products() {
    let tools = match toolchain() {
        Ok(tools) => tools,
        Err(why) => return eprintln!("skipped: {why}; `cargo xtask ptxas --install` fetches the tools"),
    };
    for probe in probes::all() {
        let (words, code) = assemble(&tools, (probe.build)());
        assert!(!words.contains("(C75") && !words.contains("(C76") && !words.contains("warning"), "{}: {words}", probe.name);
        assert!(words.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"), "{}: {words}", probe.name);
        let count = |what: &str| code.lines().filter(|line| line.contains(what)).count();
        let (stages, products) = (count("WARPGROUP.ARRIVE"), count("GMMA."));
        assert_eq!(stages, probe.allowances.wgmma_stages as usize, "{}: stages of wgmma, holding {products} products", probe.name);
        assert_eq!(products > 0, stages > 0, "{}: the disassembler's words have changed", probe.name);
    }
}

#[test]
fn launches_that_write_tables_assemble_without_spills() {
    let Ok(tools) = toolchain() else { return };
    let decl = MapDecl { ty: MapType::U32, rank: 2, box_dims: vec![4, 4], im2col: false, swizzle: Swizzle::None, access: Access::Read };
    let spec = MapSpec {
        decl: decl.clone(),
        dims: vec![8, 8],
        strides_bytes: vec![32],
        element_strides: vec![1, 1],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Fill::Zero,
        l2: L2Promotion::B128,
    };
    let mut program = Program::default();
    table::add_addresses(&mut program, "addresses", &[Address::buffer(0)]);
    table::add_tensor_maps(&mut program, "maps", &decl, &[(Address::buffer(0), spec)]);
    for launch in program.launches() {
        let body = launch.kernel.build();
        launch.check(&body).expect("arguments fit");
        let (words, _) = assemble(&tools, body);
        assert!(!words.contains("warning") && words.contains(" 0 bytes spill stores"), "{words}");
    }
}
