//! Probes in which CTAs wait for each other: the recurrent layer and the norm over a cluster.

use verdigris_kir::interp::{Kernels, Memory};
use verdigris_kir::program::Residency;
use verdigris_probes::constructs::{cluster_norm, recurrent_step};

use crate::harness::{
    Numbers, bf16_bytes, compare, dense_map, f32_bytes, float, launch, map_decl, number, pointer, read_bf16, read_f32, run, schedules,
    u32_bytes, wanted,
};

#[test]
fn a_recurrent_layer_step_by_step() {
    let spec = recurrent_step::Spec { units: 192, batch: 16 };
    let (units, batch, steps) = (spec.units as usize, spec.batch as usize, 5usize);
    let mut numbers = Numbers::new(3);
    let weights: Vec<f32> = numbers.take(units * units).iter().map(|x| x / 8.0).collect();
    let first = numbers.take(batch * units);
    let x = numbers.take(steps * batch * units);
    let kernels = Kernels::new();
    for options in schedules() {
        let mut memory = Memory::new();
        let states = memory.add_filled(((steps + 1) * batch * units * 2) as u64, 0xff);
        memory.write(states, 0, &bf16_bytes(&first));
        let (x_slot, r_slot, arrivals) = (memory.add(&f32_bytes(&x)), memory.add(&bf16_bytes(&weights)), memory.add(&u32_bytes(&[0])));
        let body = spec.build();
        let args = vec![
            dense_map(states, map_decl(&body, 0), &[units as u64, batch as u64, steps as u64 + 1]),
            pointer(states),
            pointer(x_slot),
            pointer(r_slot),
            number(steps as u32),
            pointer(arrivals),
        ];
        let grid = [spec.units / recurrent_step::UNITS, 1, 1];
        run(&[launch(body, grid, Residency::All, args)], &kernels, &mut memory, &options);

        // Each step against its own input, so that errors do not grow from one to the next.
        let states = read_bf16(&mut memory, states);
        let wanted = wanted(steps * batch * units, |index| {
            let (unit, row) = (index % units, index / units);
            let before = &states[row * units..][..units];
            let sum: f64 = weights[unit * units..][..units].iter().zip(before).map(|(r, h)| f64::from(*r) * f64::from(*h)).sum();
            let state = (sum + f64::from(x[index])).tanh();
            // Rounding to bf16, and tanh within 2⁻¹¹.
            (state, state.abs() * (1.0 / 256.0 + 1.0 / 2048.0) + 1e-4)
        });
        compare("h", &states[batch * units..], &wanted);
    }
}

fn norm(spec: cluster_norm::Spec, rows: usize, columns: usize, clusters: u32) {
    let part = (columns as u32).div_ceil(4 * spec.cluster) * 4;
    let mut numbers = Numbers::new(columns as u64);
    // Far from zero, so that a variance without centring would drown.
    let x: Vec<f32> = numbers.take(rows * columns).iter().map(|x| x + 100.0).collect();
    let gamma = numbers.take(columns);
    let epsilon = 1e-5f32;
    let wanted = wanted(rows * columns, |index| {
        let row = &x[index / columns * columns..][..columns];
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / columns as f64;
        let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / columns as f64;
        let value = (f64::from(x[index]) - mean) / (variance + f64::from(epsilon)).sqrt() * f64::from(gamma[index % columns]);
        // The mean is good to a few roundings of a number near 100.
        (value, value.abs() * 1e-5 + 1e-4)
    });
    let kernels = Kernels::new();
    let mut first: Option<Vec<u8>> = None;
    for options in schedules() {
        let mut memory = Memory::new();
        let (x_slot, gamma_slot) = (memory.add(&f32_bytes(&x)), memory.add(&f32_bytes(&gamma)));
        let y_slot = memory.add_filled((4 * x.len()) as u64, 0xff);
        let args = vec![
            pointer(x_slot),
            pointer(gamma_slot),
            pointer(y_slot),
            number(rows as u32),
            number(columns as u32),
            number(part),
            float(1.0 / columns as f32),
            float(epsilon),
        ];
        run(&[launch(spec.build(), [clusters * spec.cluster, 1, 1], Residency::Any, args)], &kernels, &mut memory, &options);
        compare("y", &read_f32(&mut memory, y_slot), &wanted);
        let bytes = memory.to_vec(y_slot);
        assert!(
            *first.get_or_insert_with(|| bytes.clone()) == bytes,
            "seed {}: the order of addition depends on the schedule",
            options.seed
        );
    }
}

#[test]
fn norms_over_clusters_of_two() {
    norm(cluster_norm::Spec { cluster: 2, vectors: 1 }, 7, 604, 2);
}

#[test]
fn norms_over_clusters_of_four_with_an_empty_part() {
    norm(cluster_norm::Spec::FULL, 5, 4, 1);
    norm(cluster_norm::Spec::FULL, 4, 6000, 1);
}
