//! The part of `verify` that holds what the interpreter counted against the bounds of cases.

use verdigris_engines::engine::{EngineId, Knobs};
use verdigris_graph::Problem;
use verdigris_kir::interp::{CLASSES, Counters};
use verdigris_reference::cases::Bounds;

/// Whether runs of an engine by a setting are held to the bounds.
pub(crate) fn apply(bounds: &Bounds, engine: EngineId, knobs: &Knobs) -> bool {
    bounds.engine == engine.name && bounds.knobs.iter().all(|(name, value)| knobs.value(name) == Some(*value))
}

/// What is beyond the bounds, in words; empty if nothing is.
pub(crate) fn broken(bounds: &Bounds, problem: &Problem, counted: &Counters) -> Vec<String> {
    let ratio = |of: u64, to: u64| if to == 0 { 0.0 } else { of as f64 / to as f64 };
    let products = if let Problem::Gemm(gemm) = problem { gemm.flops() / 2.0 } else { 0.0 };
    let over_products = |count: u64| if products > 0.0 { count as f64 / products } else { 0.0 };
    let global = [
        counted.global_load_bytes + counted.global_store_bytes,
        counted.unique_load_bytes + counted.unique_store_bytes,
        counted.load_sectors + counted.store_sectors,
        counted.load_requests + counted.store_requests,
    ];
    let mut list = vec![
        ("global_bytes_ratio".to_owned(), bounds.global_bytes_ratio, ratio(global[0], global[1])),
        ("sectors_per_request".to_owned(), bounds.sectors_per_request, ratio(global[2], global[3])),
        ("wavefronts_per_access".to_owned(), bounds.wavefronts_per_access, ratio(counted.shared_wavefronts, counted.shared_requests)),
        ("mac_ratio".to_owned(), bounds.mac_ratio, over_products(counted.macs)),
    ];
    for (name, &bound) in &bounds.instructions {
        let class = CLASSES.iter().find(|class| format!("{class:?}").to_lowercase() == *name);
        // A class that does not exist is beyond every bound, so that a slip of the pen is seen.
        let count = class.map_or(f64::INFINITY, |class| 1000.0 * over_products(counted.of_class(*class)));
        list.push((format!("instructions.{name}"), Some(bound), count));
    }
    list.into_iter()
        .filter_map(|(name, bound, value)| {
            let bound = bound.filter(|&bound| value > bound)?;
            Some(format!("{name} is {value:.4}, bounded by {bound}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::GemmProblem;
    use verdigris_tensor::DType;

    const ID: EngineId = EngineId { name: "gemm.test", number: 0 };

    fn bounds() -> Bounds {
        Bounds {
            engine: "gemm.test".to_owned(),
            knobs: [("tile".to_owned(), 64)].into(),
            global_bytes_ratio: Some(1.5),
            sectors_per_request: Some(4.0),
            wavefronts_per_access: Some(1.0),
            mac_ratio: Some(2.0),
            instructions: [("integer".to_owned(), 100.0)].into(),
        }
    }

    /// Every quantity at its bound.
    fn counters() -> Counters {
        let mut counted = Counters {
            global_load_bytes: 1000,
            unique_load_bytes: 600,
            global_store_bytes: 500,
            unique_store_bytes: 400,
            load_requests: 6,
            load_sectors: 20,
            store_requests: 4,
            store_sectors: 20,
            shared_requests: 7,
            shared_wavefronts: 7,
            macs: 2000,
            ..Counters::default()
        };
        counted.instructions[CLASSES.iter().position(|class| format!("{class:?}") == "Integer").expect("a class")] = 100;
        counted
    }

    #[test]
    fn what_is_at_its_bound_passes_and_what_is_beyond_is_named() {
        let problem = Problem::Gemm(GemmProblem::packed(10, 10, 10, DType::F32, DType::F32).expect("a product"));
        let (bounds, good) = (bounds(), counters());
        assert_eq!(broken(&bounds, &problem, &good), Vec::<String>::new());
        let named = |counted: Counters, name: &str| {
            let found = broken(&bounds, &problem, &counted);
            assert!(found.len() == 1 && found[0].starts_with(name), "{name}: {found:?}");
        };
        named(Counters { global_load_bytes: 1001, ..good.clone() }, "global_bytes_ratio is 1.501");
        named(Counters { unique_store_bytes: 399, ..good.clone() }, "global_bytes_ratio");
        named(Counters { store_sectors: 21, ..good.clone() }, "sectors_per_request is 4.1");
        named(Counters { shared_wavefronts: 8, ..good.clone() }, "wavefronts_per_access");
        named(Counters { macs: 2001, ..good.clone() }, "mac_ratio is 2.001");
        let mut more = good.clone();
        more.instructions.iter_mut().for_each(|count| *count += 1);
        named(more, "instructions.integer is 101");
        let slip = Bounds { instructions: [("intger".to_owned(), 1e9)].into(), ..bounds.clone() };
        assert_eq!(broken(&slip, &problem, &good), ["instructions.intger is inf, bounded by 1000000000"]);
    }

    #[test]
    fn only_the_settings_that_are_meant_are_held() {
        assert!(apply(&bounds(), ID, &Knobs::new([("tile", 64), ("group", 8)])));
        assert!(!apply(&bounds(), ID, &Knobs::new([("tile", 128), ("group", 8)])));
        assert!(!apply(&bounds(), EngineId { name: "gemm.other", number: 1 }, &Knobs::new([("tile", 64)])));
    }
}
