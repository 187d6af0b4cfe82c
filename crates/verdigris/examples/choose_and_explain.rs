//! Who takes a problem, what would be chosen, and why: for a described chip, without a GPU. With one, the plan of a graph tells the same of
//! each of its parts.
//!
//! ```sh
//! cargo run --release --example choose_and_explain
//! ```
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use verdigris::{
    Arch, BinaryOp, Config, DType, Device, GemmProblem, GraphBuilder, Layout, Limits, Policy, Precision, Problem, Reason, Settings, survey,
};

const EXTENT: u64 = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let problem = Problem::Gemm(GemmProblem::packed(EXTENT, EXTENT, EXTENT, DType::Bf16, DType::Bf16)?);
    let arch = Arch::h200();

    // Every engine is asked: those that take the problem, the fastest by estimate first, then the others with their reasons.
    let free = survey(&problem, &arch, &Limits::default());
    print!("{EXTENT}³ in bf16 on {}\n{free}", arch.name);
    let best = free.ranked.first().ok_or("nobody takes the problem")?;
    assert!(best.notes.tensor_core, "{best}");
    // No estimate promises more than the chip has: 2mnk operations at 989.5 TFLOPS, the dense bf16 rate of the data sheet.
    let least_us = 2.0 * (EXTENT as f64).powi(3) / 989.5e6;
    assert!(best.cost.us >= least_us && best.cost.us < 3.0 * least_us, "{best}: the least is {least_us} µs");

    // Limits forbid: here tensor cores and workspace. An engine that has no other way says so.
    let limits = Limits { tensor_cores: false, workspace_bytes: Some(0), ..Limits::default() };
    let limited = survey(&problem, &arch, &limits);
    print!("\nwithout tensor cores and workspace\n{limited}");
    assert!(!limited.ranked.is_empty() && limited.ranked.iter().all(|way| !way.notes.tensor_core && way.workspace_bytes() == 0));
    assert!(limited.refusals.iter().any(|refusal| refusal.engine == best.engine && refusal.reason == Reason::Precision));
    assert!(limited.ranked[0].cost.us > best.cost.us);

    // All configs of one engine; each is named by its knobs and can be asked for.
    let all = survey(&problem, &arch, &Limits { engine: Some(best.engine.name.to_owned()), settings: Settings::All, ..Limits::default() });
    println!("\n{} has {} configs; the first three:", best.engine, all.ranked.len());
    all.ranked.iter().take(3).for_each(|way| println!("  {way}"));
    assert!(all.ranked.is_sorted_by(|before, after| before.cost.us <= after.cost.us));
    let settings = Settings::Matching(all.ranked[1].knobs.clone());
    let one = survey(&problem, &arch, &Limits { engine: Some(best.engine.name.to_owned()), settings, ..Limits::default() });
    assert_eq!(one.ranked[0].knobs, all.ranked[1].knobs);

    match Device::open("cuda", &Config::from_environment()?, Policy::default()) {
        Ok(device) => {
            let plan = device.plan(&bias_and_product()?)?;
            print!("\n{}", plan.explain().ok_or("a plan of a GPU is explained")?);
        }
        Err(error) => println!("\nno plan of a graph: {error}"),
    }
    Ok(())
}

fn bias_and_product() -> Result<verdigris::Graph, Box<dyn Error>> {
    let mut g = GraphBuilder::new("product and bias");
    let a = g.tensor("a", DType::Bf16, Layout::row_major(&[EXTENT, EXTENT])?);
    let b = g.tensor("b", DType::Bf16, Layout::row_major(&[EXTENT, EXTENT])?);
    let bias = g.tensor("bias", DType::Bf16, Layout::row_major(&[1, EXTENT])?);
    let product = g.matmul("product", a, b, Precision::Fp32)?;
    let y = g.binary("add bias", BinaryOp::Add, product, bias)?;
    g.store(y, "y", DType::Bf16)?;
    Ok(g.finish()?)
}

#[test]
fn it_runs() -> Result<(), Box<dyn Error>> {
    main()
}
