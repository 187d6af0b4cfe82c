//! Matrix multiplication and convolution: from ops on tensors to products of tables.
//!
//! All precisions are served in two types. f64 sums are in f64; so are the exact 32-bit sums of 8-bit integers, which fit its 53 bits up
//! to a depth of 2³⁷ and are wrapped at the end. All others are in f32 from operands as stored: tf32, f16 sums and fp8 sums come out more
//! exact than their policies ask for.

use rayon::prelude::*;
use verdigris_graph::{Conv, ConvDirection, ConvMode, HostScalar, Matmul, Node, OperandScale, Precision, TensorDesc, Uid};
use verdigris_tensor::Layout;

use crate::conv::{Geometry, Order, Tensor5, dgrad, fprop, wgrad};
use crate::elements::{Loaded, View, ViewMut, broadcast, no_layout, row_major};
use crate::engine::Engine;
use crate::gemm::{Gather, Operand, TILE_ROWS, Target, gemm, pack_whole, packed_len};
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;
use crate::scratch::Scratch;

/// The number of elements under dims.
fn elements(dims: &[u64]) -> u64 {
    dims.iter().fold(1u64, |all, &dim| all.saturating_mul(dim))
}

/// What an exact sum of integers becomes in 32 bits.
fn wrap<T: Real>(numbers: &mut [T]) {
    numbers.par_iter_mut().for_each(|number| *number = T::from_f64(f64::from(number.to_f64() as i64 as i32)));
}

fn matmul(op: &Matmul, context: &Context<'_>, output: ViewMut<'_>) {
    match op.precision {
        Precision::F64 => matmul_in::<f64>(op, context, output),
        Precision::I32 => matmul_in::<f64>(op, context, output),
        _ => matmul_in::<f32>(op, context, output),
    }
}

fn matmul_in<T: Real>(op: &Matmul, context: &Context<'_>, output: ViewMut<'_>) {
    let scratch = context.scratch;
    let a = scaled::<T>(context, op.d, op.a, op.scale_a, true);
    let b = scaled::<T>(context, op.d, op.b, op.scale_b, false);
    let layout = output.layout;
    let rank = layout.rank();
    // Where columns of D lie together, the transposed product is formed: Dᵀ = Bᵀ · Aᵀ.
    let strides = layout.strides();
    let transposed = strides[rank - 2] == 1 && strides[rank - 1] != 1;
    let order = if transposed { column_major(&layout) } else { row_major(&layout) };
    let alpha = context.scalar(op.alpha);
    let beta = context.scalar(op.beta);
    output.fill::<T>(scratch, order, |d| {
        product(scratch, &layout, transposed, &a, &b, d);
        if op.precision == Precision::I32 {
            wrap(d);
        }
        let c = op.c.filter(|_| beta != 0.0);
        if op.alpha != HostScalar::ONE || c.is_some() {
            scale_and_add(context, op, alpha, beta, c, &order, d);
        }
    });
}

fn column_major(layout: &Layout) -> Layout {
    let mut order: Vec<usize> = (0..layout.rank()).collect();
    order.swap(layout.rank() - 2, layout.rank() - 1);
    Layout::with_order(layout.dims(), &order).unwrap_or(*layout)
}

/// An operand of `d` as numbers, with its fp8 factors multiplied in.
fn scaled<'r, 's, T: Real>(context: &Context<'r>, d: Uid, uid: Uid, scale: Option<OperandScale>, is_left: bool) -> Loaded<'r, 's, T>
where
    'r: 's,
{
    let view = context.view(uid);
    let Some(scale) = scale else { return view.load(context.scratch) };
    let factors = context.view(scale.tensor).load_row_major::<T>(context.scratch);
    let dims = view.layout.dims();
    let Some([outer, k]) = scale.block else {
        let factor = factors.data()[0];
        let mut numbers = T::pool(context.scratch).lend(view.layout.elements() as usize);
        view.gather(0, &mut numbers);
        numbers.iter_mut().for_each(|number| *number = *number * factor);
        return Loaded::converted(numbers, row_major(&view.layout));
    };
    let (rows, columns) = (dims[dims.len() - 2] as usize, dims[dims.len() - 1] as usize);
    // Blocks are [outer, k]: rows by columns of A, columns by rows of B.
    let blocks = if is_left {
        (rows.div_ceil(outer as usize), columns.div_ceil(k as usize))
    } else {
        (columns.div_ceil(outer as usize), rows.div_ceil(k as usize))
    };
    let under = |batch: &[u64], matrix: [usize; 2]| batch.iter().copied().chain(matrix.map(|dim| dim as u64)).collect::<Vec<_>>();
    let blocks_of = |batch: &[u64]| under(batch, [blocks.0, blocks.1]);
    // Factors are of the batch of D: where they tell matrices apart that the operand does not, each of D's has one of its own.
    let own = &dims[..dims.len() - 2];
    let all = context.tensor(d).layout.dims();
    let batch = if factors.layout.broadcast_to(&blocks_of(own)).is_ok() { own } else { &all[..all.len() - 2] };
    let layout = broadcast(&context.tensor(uid).name, &view.layout, &under(batch, [rows, columns]));
    let factor_layout = broadcast(&context.tensor(scale.tensor).name, &factors.layout, &blocks_of(batch));
    let mut numbers = T::pool(context.scratch).lend(layout.elements() as usize);
    View { layout, ..view }.gather(0, &mut numbers);
    let matrix = rows * columns;
    for (batch, numbers) in numbers.chunks_mut(matrix.max(1)).enumerate() {
        for (i, number) in numbers.iter_mut().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let (outer_block, k_block) =
                if is_left { (row / outer as usize, column / k as usize) } else { (column / outer as usize, row / k as usize) };
            let position = (batch * blocks.0 + outer_block) * blocks.1 + k_block;
            let offset = factor_layout.offset_of_position(position as u64).unwrap_or(0);
            *number = *number * factors.data()[offset as usize];
        }
    }
    Loaded::converted(numbers, row_major(&layout))
}

/// `d = a · b`, packed with the batch slowest.
fn product<T: Real>(scratch: &Scratch, layout: &Layout, transposed: bool, a: &Loaded<'_, '_, T>, b: &Loaded<'_, '_, T>, d: &mut [T]) {
    let rank = layout.rank();
    let dims = layout.dims();
    let batch_dims = &dims[..rank - 2];
    let (m, n) = (dims[rank - 2] as usize, dims[rank - 1] as usize);
    if m * n == 0 || batch_dims.contains(&0) {
        return;
    }
    let side = |operand: &Loaded<'_, '_, T>, outer_is_row: bool| {
        let own = operand.layout.rank();
        let (dims, strides) = (operand.layout.dims(), operand.strides());
        let (outer, depth) = if outer_is_row { (own - 2, own - 1) } else { (own - 1, own - 2) };
        let table = |dim: usize| scratch.places.collected(dims[dim] as usize, (0..dims[dim] as usize).map(|i| i * strides[dim]));
        let matrices =
            Layout::new(&dims[..own - 2], &operand.layout.strides()[..own - 2]).unwrap_or_else(|source| no_layout("operand", source));
        (table(outer), table(depth), broadcast("operand", &matrices, batch_dims))
    };
    let left = (a, side(a, true));
    let right = (b, side(b, false));
    let ((rows_of, (row_offsets, row_depth, row_batch)), (columns_of, (column_offsets, column_depth, column_batch))) =
        if transposed { (right, left) } else { (left, right) };
    let (row_count, column_count, depth) = (row_offsets.len(), column_offsets.len(), row_depth.len());
    let batches: usize = batch_dims.iter().product::<u64>() as usize;
    let threads = rayon::current_num_threads();
    let parts = if batches >= 2 * threads { 1 } else { 2 * threads };
    let rows_at_once = row_count.div_ceil(parts).next_multiple_of(TILE_ROWS).max(4 * TILE_ROWS);
    let columns = scratch.places.collected(column_count, 0..column_count);
    d.par_chunks_mut(m * n).enumerate().for_each(|(batch, d)| {
        let start = |layout: &Layout| layout.offset_of_position(batch as u64).unwrap_or(0) as usize;
        let row_data = rows_of.data().get(start(&row_batch)..).unwrap_or(&[]);
        let column_data = columns_of.data().get(start(&column_batch)..).unwrap_or(&[]);
        let gather = Gather { data: column_data, outer: &column_offsets, depth: &column_depth };
        let shared = row_count > rows_at_once;
        let mut panels = T::pool(scratch).lend(if shared { packed_len(column_count, depth, T::TILE_COLUMNS) } else { 0 });
        if shared {
            pack_whole(gather, T::TILE_COLUMNS, &mut panels);
        }
        let right = if shared { Operand::Packed { panels: &panels, outer: column_count } } else { Operand::Gather(gather) };
        d.par_chunks_mut(rows_at_once * column_count).enumerate().for_each(|(part, d)| {
            let row_count = d.len() / column_count;
            let rows = scratch.places.collected(row_count, (0..row_count).map(|i| i * column_count));
            let outer = &row_offsets[part * rows_at_once..][..rows.len()];
            let left = Operand::Gather(Gather { data: row_data, outer, depth: &row_depth });
            gemm(scratch, d, Target { rows: &rows, columns: &columns }, (left, 0), right, depth, false);
        });
    });
}

/// `d = alpha · d + beta · c`, in f32 or, for f64 operands, in f64.
fn scale_and_add<T: Real>(context: &Context<'_>, op: &Matmul, alpha: f64, beta: f64, c: Option<Uid>, order: &Layout, d: &mut [T]) {
    let in_f32 = op.precision != Precision::F64;
    let round = |value: f64| if in_f32 { f64::from(value as f32) } else { value };
    let (alpha, beta) = (round(alpha), round(beta));
    let addend = c.map(|c| {
        let view = context.view(c);
        let layout = broadcast(&context.tensor(c).name, &view.layout, order.dims());
        let mut numbers = T::pool(context.scratch).lend(d.len());
        in_order(&View { layout, ..view }, order, &mut numbers);
        numbers
    });
    let chunk = 1 << 14;
    d.par_chunks_mut(chunk).enumerate().for_each(|(i, d)| {
        let c = addend.as_ref().map(|c| &c[i * chunk..][..d.len()]);
        for (j, d) in d.iter_mut().enumerate() {
            let scaled = round(alpha * round(d.to_f64()));
            *d = T::from_f64(match c {
                Some(c) => scaled + round(beta * c[j].to_f64()),
                None => scaled,
            });
        }
    });
}

/// The elements of a view in the order of a packed layout of the same dims.
fn in_order<T: Real>(view: &View<'_>, order: &Layout, numbers: &mut [T]) {
    let mut by_stride: Vec<usize> = (0..order.rank()).collect();
    by_stride.sort_by_key(|&i| (std::cmp::Reverse(order.strides()[i]), i));
    let layout = view.layout.permuted(&by_stride).unwrap_or(view.layout);
    View { layout, ..*view }.gather(0, numbers);
}

fn conv(op: &Conv, context: &Context<'_>, output: ViewMut<'_>) {
    match op.precision {
        Precision::F64 | Precision::I32 => conv_in::<f64>(op, context, output),
        _ => conv_in::<f32>(op, context, output),
    }
}

fn conv_in<T: Real>(op: &Conv, context: &Context<'_>, output: ViewMut<'_>) {
    let scratch = context.scratch;
    let geometry = geometry(op, context);
    let layout = output.layout;
    let load = |uid: Uid| context.view(uid).load::<T>(scratch);
    let image_order = if strides5(&layout)[1] == 1 && strides5(&layout)[4] != 1 { Order::ChannelsLast } else { Order::ChannelsFirst };
    let order_layout = |order: Order| match order {
        Order::ChannelsFirst => row_major(&layout),
        Order::ChannelsLast => {
            let dims: Vec<usize> = std::iter::once(0).chain(2..layout.rank()).chain([1]).collect();
            Layout::with_order(layout.dims(), &dims).unwrap_or(layout)
        }
    };
    let finish = |numbers: &mut [T]| {
        if op.precision == Precision::I32 {
            wrap(numbers);
        }
    };
    match op.direction {
        ConvDirection::Fprop => {
            let (x, w) = (load(op.x), load(op.w));
            output.fill::<T>(scratch, order_layout(image_order), |y| {
                fprop(scratch, &geometry, tensor5(&x), tensor5(&w), y, image_order);
                finish(y);
            });
        }
        ConvDirection::Dgrad => {
            let (y, w) = (load(op.y), load(op.w));
            output.fill::<T>(scratch, order_layout(image_order), |x| {
                dgrad(scratch, &geometry, tensor5(&y), tensor5(&w), x, image_order);
                finish(x);
            });
        }
        ConvDirection::Wgrad => {
            let (x, y) = (load(op.x), load(op.y));
            output.fill::<T>(scratch, row_major(&layout), |w| {
                wgrad(scratch, &geometry, tensor5(&x), tensor5(&y), w);
                finish(w);
            });
        }
    }
}

fn geometry(op: &Conv, context: &Context<'_>) -> Geometry {
    let dims = |uid: Uid| context.tensor(uid).layout.dims();
    let (x, w, y) = (dims(op.x), dims(op.w), dims(op.y));
    let groups = op.groups as usize;
    Geometry {
        batch: x[0] as usize,
        groups,
        channels: x[1] as usize / groups,
        filters: w[0] as usize / groups,
        extent: three(&x[2..], 1),
        filter: three(&w[2..], 1),
        out: three(&y[2..], 1),
        stride: three(&op.strides, 1),
        dilation: three(&op.dilations, 1),
        pad: three(&op.pads_before, 0),
        flip: op.mode == ConvMode::Convolution,
    }
}

/// Up to three numbers, with `missing` before them.
fn three(numbers: &[u64], missing: usize) -> [usize; 3] {
    let mut all = [missing; 3];
    for (place, &number) in all[3 - numbers.len()..].iter_mut().zip(numbers) {
        *place = number as usize;
    }
    all
}

fn strides5(layout: &Layout) -> [usize; 5] {
    let strides = layout.strides();
    let [d, h, w] = three(&strides[2..], 0);
    [strides[0] as usize, strides[1] as usize, d, h, w]
}

fn tensor5<'l, T: Real>(loaded: &'l Loaded<'_, '_, T>) -> Tensor5<'l, T> {
    Tensor5 { data: loaded.data(), strides: strides5(&loaded.layout) }
}

impl Operation for Matmul {
    const ENGINE: Engine = Engine::Gemm;

    fn flops<'g>(&self, tensor: &dyn Fn(Uid) -> &'g TensorDesc) -> u64 {
        let k = tensor(self.a).layout.dims().last().copied().unwrap_or(0);
        elements(tensor(self.d).layout.dims()).saturating_mul(k).saturating_mul(2)
    }

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            matmul(self, context, output);
        }
    }
}

impl Operation for Conv {
    const ENGINE: Engine = Engine::ConvGemm;

    fn flops<'g>(&self, tensor: &dyn Fn(Uid) -> &'g TensorDesc) -> u64 {
        elements(tensor(self.y).layout.dims()).saturating_mul(elements(&tensor(self.w).layout.dims()[1..])).saturating_mul(2)
    }

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            conv(self, context, output);
        }
    }
}
