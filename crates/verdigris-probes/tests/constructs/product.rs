//! Probes around one main loop: split depth, tiles on demand, groups, and the convolution.

use verdigris_kir::interp::{Kernels, Memory};
use verdigris_kir::ir::MapDecl;
use verdigris_kir::program::{Address, Arg, Fill, L2Promotion, MapSpec, Program, Residency, Step};
use verdigris_kir::tile::dynamic::DynamicArgs;
use verdigris_kir::tile::schedule::{RasterArgs, ScheduleArgs};
use verdigris_kir::tile::table;
use verdigris_probes::constructs::{ProductTile, dynamic_schedule, grouped_product, im2col_tile, stream_k};

use crate::harness::{
    Numbers, bf16_bytes, compare, dense_map, launch, map_decl, number, pointer, read_bf16, read_f32, run, run_program, schedules,
    u32_bytes, wanted,
};

const TILE: ProductTile = ProductTile { rows: 64, columns: 64, stages: 2 };

/// A product with ragged edges in all three directions.
struct Problem {
    rows: usize,
    columns: usize,
    depth: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Problem {
    fn new(rows: usize, columns: usize, depth: usize) -> Self {
        let mut numbers = Numbers::new((rows * columns + depth) as u64);
        Problem { rows, columns, depth, a: numbers.take(rows * depth), b: numbers.take(columns * depth) }
    }

    fn tiles(&self) -> (u32, u32) {
        ((self.rows as u32).div_ceil(TILE.rows), (self.columns as u32).div_ceil(TILE.columns))
    }

    fn steps(&self) -> u32 {
        (self.depth as u32).div_ceil(ProductTile::DEPTH)
    }

    fn wanted(&self) -> Vec<(f64, f64)> {
        wanted(self.rows * self.columns, |index| {
            let (row, column) = (index / self.columns, index % self.columns);
            let a = &self.a[row * self.depth..][..self.depth];
            let b = &self.b[column * self.depth..][..self.depth];
            let terms = || a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            (terms().sum(), terms().map(f64::abs).sum::<f64>() * 1e-5)
        })
    }

    fn a_map(&self, slot: usize, decl: MapDecl) -> Arg {
        dense_map(slot, decl, &[self.depth as u64, self.rows as u64, 1])
    }

    fn b_map(&self, slot: usize, decl: MapDecl) -> Arg {
        dense_map(slot, decl, &[self.depth as u64, self.columns as u64, 1])
    }
}

#[test]
fn split_depth_joins_in_the_same_order_whatever_the_schedule() {
    let spec = stream_k::Spec { tile: TILE };
    let problem = Problem::new(150, 130, 328);
    let wanted = problem.wanted();
    let (rows, columns) = problem.tiles();
    let raster = RasterArgs::new(rows, columns, 2, false);
    let kernels = Kernels::new();
    for (split_tiles, workers) in [(9, 4), (5, 7), (0, 3), (9, 20)] {
        let schedule = ScheduleArgs::split(raster, rows * columns, problem.steps(), split_tiles, workers, 1);
        let mut first: Option<Vec<u8>> = None;
        for options in schedules() {
            let mut memory = Memory::new();
            let (a, b) = (memory.add(&bf16_bytes(&problem.a)), memory.add(&bf16_bytes(&problem.b)));
            let d = memory.add_filled((problem.rows * problem.columns * 4) as u64, 0xff);
            let parts = memory.add_unwritten(u64::from(rows * columns * schedule.most_parts() * TILE.rows * TILE.columns * 4));
            let counters = memory.add_filled(u64::from(rows * columns * TILE.rows / 64 * 4), 0);
            let body = spec.build();
            let mut args = vec![problem.a_map(a, map_decl(&body, 0)), problem.b_map(b, map_decl(&body, 1))];
            args.extend(schedule.bound(true));
            args.extend([pointer(d), number(problem.rows as u32), number(problem.columns as u32)]);
            args.extend([pointer(parts), pointer(counters), number(schedule.most_parts())]);
            run(&[launch(body, [workers, 1, 1], Residency::Any, args)], &kernels, &mut memory, &options);
            compare("d", &read_f32(&mut memory, d), &wanted);
            let bytes = memory.to_vec(d);
            assert!(*first.get_or_insert_with(|| bytes.clone()) == bytes, "seed {}: another order of addition", options.seed);
        }
    }
}

#[test]
fn tiles_on_demand_are_all_done_once() {
    let problem = Problem::new(150, 130, 136);
    let wanted = problem.wanted();
    let (rows, columns) = problem.tiles();
    let kernels = Kernels::new();
    for (slots, workers) in [(1, 1), (2, 3), (3, 12)] {
        let spec = dynamic_schedule::Spec { tile: TILE, slots };
        let schedule = DynamicArgs { raster: RasterArgs::new(rows, columns, 8, true), tiles: rows * columns, steps: problem.steps() };
        for options in schedules() {
            let mut memory = Memory::new();
            let (a, b) = (memory.add(&bf16_bytes(&problem.a)), memory.add(&bf16_bytes(&problem.b)));
            let d = memory.add_filled((problem.rows * problem.columns * 4) as u64, 0xff);
            let counter = memory.add(&u32_bytes(&[0]));
            let body = spec.build();
            let mut args = vec![problem.a_map(a, map_decl(&body, 0)), problem.b_map(b, map_decl(&body, 1))];
            args.extend(schedule.bound(Address::buffer(counter)));
            args.extend([pointer(d), number(problem.rows as u32), number(problem.columns as u32)]);
            run(&[launch(body, [workers, 1, 1], Residency::Any, args)], &kernels, &mut memory, &options);
            compare("d", &read_f32(&mut memory, d), &wanted);
        }
    }
}

#[test]
fn products_of_different_sizes_in_one_launch() {
    let spec = grouped_product::Spec { tile: TILE, products: 4 };
    let problems = [Problem::new(70, 64, 64), Problem::new(5, 10, 200), Problem::new(130, 66, 8), Problem::new(64, 130, 136)];
    let wanted: Vec<_> = problems.iter().map(Problem::wanted).collect();
    let mut extents = vec![];
    let mut tiles = 0;
    for problem in &problems {
        let (rows, columns) = problem.tiles();
        tiles += rows * columns;
        extents.extend([problem.rows as u32, problem.columns as u32, problem.depth as u32, tiles]);
    }
    let kernels = Kernels::new();
    for workers in [1, 3, 20] {
        for options in schedules() {
            let mut memory = Memory::new();
            let a: Vec<usize> = problems.iter().map(|problem| memory.add(&bf16_bytes(&problem.a))).collect();
            let b: Vec<usize> = problems.iter().map(|problem| memory.add(&bf16_bytes(&problem.b))).collect();
            let d: Vec<usize> =
                problems.iter().map(|problem| memory.add_filled((problem.rows * problem.columns * 4) as u64, 0xff)).collect();
            let extents = memory.add(&u32_bytes(&extents));
            let maps = memory.add_unwritten(u64::from(workers * grouped_product::MAP_BYTES));

            let addresses: Vec<Address> = a.iter().zip(&d).flat_map(|(a, d)| [*a, *d].map(Address::buffer)).collect();
            let mut program = Program::default();
            let table = table::add_addresses(&mut program, "operands", &addresses);
            let body = spec.build();
            let mut args = vec![problems[0].a_map(a[0], map_decl(&body, 0))];
            args.extend(problems.iter().zip(&b).map(|(problem, slot)| problem.b_map(*slot, map_decl(&body, 1))));
            args.extend([Arg::Pointer(table), pointer(extents), pointer(maps), number(tiles)]);
            program.steps.push(Step::Launch(launch(body, [workers, 1, 1], Residency::Any, args)));
            run_program(&program, &kernels, &mut memory, &options);
            for (slot, wanted) in d.iter().zip(&wanted) {
                compare("d", &read_f32(&mut memory, *slot), wanted);
            }
        }
    }
}

/// Images, height, width, channels, filters; filter height and width; stride, padding.
struct Convolution {
    x: [usize; 4],
    filters: usize,
    filter: [usize; 2],
    stride: usize,
    padding: usize,
}

fn convolve(spec: im2col_tile::Spec, problem: &Convolution) {
    let Convolution { x: [images, height, width, channels], filters, filter: [r, s], stride, padding } = *problem;
    let (p, q) = ((height + 2 * padding - r) / stride + 1, (width + 2 * padding - s) / stride + 1);
    let mut numbers = Numbers::new((height * width * r * s) as u64);
    let x = numbers.take(images * height * width * channels);
    let w = numbers.take(filters * r * s * channels);
    let wanted = wanted(images * p * q * filters, |index| {
        let (pixel, filter) = (index / filters, index % filters);
        let (image, row, column) = (pixel / (p * q), pixel / q % p, pixel % q);
        let (mut sum, mut magnitude) = (0.0, 0.0);
        for (i, j) in (0..r * s).map(|tap| (tap / s, tap % s)) {
            let (h, v) = ((row * stride + i).wrapping_sub(padding), (column * stride + j).wrapping_sub(padding));
            if h < height && v < width {
                for c in 0..channels {
                    let term = f64::from(x[((image * height + h) * width + v) * channels + c])
                        * f64::from(w[((filter * r + i) * s + j) * channels + c]);
                    sum += term;
                    magnitude += term.abs();
                }
            }
        }
        // The result is rounded to bf16.
        (sum, sum.abs() / 256.0 + magnitude * 1e-5)
    });
    let kernels = Kernels::new();
    for options in schedules() {
        let mut memory = Memory::new();
        let (x_slot, w_slot) = (memory.add(&bf16_bytes(&x)), memory.add(&bf16_bytes(&w)));
        let y_slot = memory.add_filled((wanted.len() * 2) as u64, 0xff);
        let body = spec.build();
        let pixel = 2 * channels as u64;
        let upper = |taps: usize| padding as i32 - (taps as i32 - 1);
        let x_map = MapSpec {
            decl: map_decl(&body, 0),
            dims: [channels, width, height, images].map(|n| n as u64).to_vec(),
            strides_bytes: vec![pixel, pixel * width as u64, pixel * (width * height) as u64],
            element_strides: vec![1, stride as u32, stride as u32, 1],
            lower_corner: vec![-(padding as i32); 2],
            upper_corner: vec![upper(s), upper(r)],
            fill: Fill::Zero,
            l2: L2Promotion::B128,
        };
        let w_map = MapSpec {
            decl: map_decl(&body, 1),
            dims: [channels, filters, r * s].map(|n| n as u64).to_vec(),
            strides_bytes: vec![pixel * (r * s) as u64, pixel],
            element_strides: vec![1; 3],
            lower_corner: vec![],
            upper_corner: vec![],
            fill: Fill::Zero,
            l2: L2Promotion::B128,
        };
        let pixels = (images * p * q) as u32;
        let args = vec![
            Arg::TensorMap(Address::buffer(x_slot), x_map),
            Arg::TensorMap(Address::buffer(w_slot), w_map),
            dense_map(y_slot, map_decl(&body, 2), &[filters as u64, u64::from(pixels), 1]),
            Arg::Divisor(q as u32),
            Arg::Divisor((p * q) as u32),
            number(stride as u32),
            number(padding as u32),
            number(r as u32),
            number(s as u32),
            number((channels as u32).div_ceil(64)),
        ];
        let grid = [pixels.div_ceil(spec.pixels), (filters as u32).div_ceil(spec.filters), 1];
        run(&[launch(body, grid, Residency::Any, args)], &kernels, &mut memory, &options);
        compare("y", &read_bf16(&mut memory, y_slot), &wanted);
    }
}

#[test]
fn a_padded_convolution_over_row_and_image_ends() {
    let spec = im2col_tile::Spec { pixels: 64, filters: 64, stages: 2 };
    convolve(spec, &Convolution { x: [3, 5, 7, 72], filters: 72, filter: [3, 3], stride: 1, padding: 1 });
}

#[test]
fn a_strided_convolution_with_an_oblong_filter() {
    let spec = im2col_tile::Spec { pixels: 128, filters: 64, stages: 3 };
    convolve(spec, &Convolution { x: [2, 15, 18, 16], filters: 40, filter: [3, 2], stride: 2, padding: 1 });
    convolve(spec, &Convolution { x: [1, 6, 4, 64], filters: 8, filter: [1, 1], stride: 1, padding: 0 });
}
