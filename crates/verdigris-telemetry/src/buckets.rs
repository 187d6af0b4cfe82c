//! Bounds of histograms. They are fixed, so that histograms of all processes can be added up.

use crate::observe::{Metric, Unit};

/// Device times: 1 µs to 10 s, three to a power of ten. They tell the order of a time; what compares times takes the mean, from sum and count.
const DEVICE_SECONDS: &[f64] =
    &[1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];

/// Planning: a hit of the caches takes tens of microseconds, tuning of a large graph minutes.
const PLAN_SECONDS: &[f64] =
    &[1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 300.0];

/// One kernel in the driver's compiler: milliseconds to seconds.
const COMPILE_SECONDS: &[f64] = &[1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0];

/// What a client waits for: 100 µs to 30 s.
const WAIT_SECONDS: &[f64] =
    &[1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 3e-2, 5e-2, 7.5e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0];

/// Powers of four from 1 KiB to 64 GiB; 0 for what needs none.
const BYTES: &[f64] = &[
    0.0,
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262144.0,
    1048576.0,
    4194304.0,
    16777216.0,
    67108864.0,
    268435456.0,
    1073741824.0,
    4294967296.0,
    17179869184.0,
    68719476736.0,
];

/// Rows of a batch, by powers of two.
const ROWS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0];

/// Something over its bound. Of an error, beyond 1 is beyond the bound; of a magnitude, 1 is the largest that the type holds, and there is nothing beyond.
const RATIOS: &[f64] = &[1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0, 1000.0];

/// The largest magnitude over the largest of the type, by powers of two over what types hold: a result of order 1 lies at 2^-128 for f32 and bf16, at 2^-16 for f16 and
/// at 2^-9 for the 8-bit e4m3. Near overflow they are closer.
static OF_LARGEST: [f64; 36] = {
    const BIAS: u64 = 1023;
    let mut bounds = [1.0; 36];
    let mut i = 0;
    while i < 32 {
        bounds[i] = f64::from_bits((BIAS - 256 + 8 * i as u64) << 52);
        i += 1;
    }
    (bounds[32], bounds[33], bounds[34]) = (1.0 / 16.0, 0.25, 0.5);
    bounds
};

/// What is not known to the table, in whatever unit.
const ANYTHING: &[f64] = &[1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9];

/// The upper bounds of a metric's buckets, rising, without the last one at infinity.
pub(crate) fn of(metric: &Metric) -> &'static [f64] {
    match (metric.unit, metric.name) {
        (Unit::Seconds, "verdigris_device_seconds") => DEVICE_SECONDS,
        (Unit::Seconds, "verdigris_plan_seconds") => PLAN_SECONDS,
        (Unit::Seconds, "verdigris_kernel_compile_seconds") => COMPILE_SECONDS,
        (Unit::Seconds, _) => WAIT_SECONDS,
        (Unit::Bytes, _) => BYTES,
        (Unit::Ratio, "verdigris_amax_ratio") => &OF_LARGEST,
        (Unit::Ratio, _) => RATIOS,
        (Unit::Count, _) => ROWS,
        (Unit::Hertz | Unit::Celsius | Unit::Watts, _) => ANYTHING,
    }
}

/// Bounds for a histogram that the table does not have: by the unit that its name ends in.
pub(crate) fn of_name(name: &str) -> &'static [f64] {
    if name.ends_with("_seconds") {
        DEVICE_SECONDS
    } else if name.ends_with("_bytes") {
        BYTES
    } else if name.ends_with("_ratio") {
        RATIOS
    } else {
        ANYTHING
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::{METRICS, MetricKind};

    #[test]
    fn bounds_rise_and_hold_what_the_metric_says() {
        for metric in METRICS.iter().filter(|metric| metric.kind == MetricKind::Histogram) {
            let bounds = of(metric);
            assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{}", metric.name);
            // Only what spans the range of f32 needs more.
            let most = if metric.name == "verdigris_amax_ratio" { 36 } else { 24 };
            assert!(bounds.iter().all(|bound| bound.is_finite()) && bounds.len() <= most, "{}", metric.name);
        }
        let device = of(crate::observe::metric_of("verdigris_device_seconds").expect("in the table"));
        assert_eq!((device.first(), device.last()), (Some(&1e-6), Some(&10.0)));
        let compile = of(crate::observe::metric_of("verdigris_kernel_compile_seconds").expect("in the table"));
        assert_ne!(compile.first(), device.first(), "a compilation is no launch");
        // Results of order 1 and a thousand times as large are told apart in each type.
        let amax = of(crate::observe::metric_of("verdigris_amax_ratio").expect("in the table"));
        assert_eq!((amax[0], amax.last()), (2.0_f64.powi(-256), Some(&1.0)));
        for (name, largest) in [("f32", f64::from(f32::MAX)), ("bf16", 3.39e38), ("f16", 65_504.0), ("e4m3", 448.0)] {
            let bucket = |value: f64| amax.iter().position(|bound| value / largest <= *bound);
            let [one, more] = [1.0, largest.min(1000.0)].map(bucket);
            assert!(one > Some(0) && one < more, "{name}: {one:?} {more:?}");
        }
    }
}
