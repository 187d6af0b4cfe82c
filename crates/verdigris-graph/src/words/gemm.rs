//! Products in words, and the steps of epilogues.

use verdigris_tensor::DType;

use super::codec::{Layouts, Named, Placed, Text, Word, call, error};
use crate::error::Error;
use crate::op::HostScalar;
use crate::ops::matmul::Precision;
use crate::ops::pointwise::{BinaryOp, Drawn, UnaryOp};
use crate::problem::{Determinism, EpilogueStep, GemmProblem, Matrix, Scale, Slot, blocks};

/// What reading fills in.
pub(super) fn blank() -> GemmProblem {
    let nothing = Matrix::row_major(Slot(0), DType::F32, 0);
    GemmProblem {
        batch: Vec::new(),
        m: 0,
        n: 0,
        k: 0,
        precision: Precision::Fp32,
        determinism: Determinism::Any,
        a: nothing.clone(),
        b: nothing.clone(),
        c: None,
        scale_a: None,
        scale_b: None,
        alpha: HostScalar::ONE,
        beta: HostScalar::ZERO,
        epilogue: Vec::new(),
        d: nothing,
    }
}

pub(super) fn describe(text: &mut Text<'_>, problem: &mut GemmProblem) -> Result<(), Error> {
    text.usual_type(|| problem.a.dtype)?;
    text.field("batch", &mut problem.batch, Some(Vec::new()))?;
    text.field("m", &mut problem.m, None)?;
    text.field("n", &mut problem.n, None)?;
    text.field("k", &mut problem.k, None)?;
    let GemmProblem { m, n, k, .. } = *problem;
    let layouts = |rows, columns| layouts(&problem.batch, rows, columns);
    let (of_a, of_b, of_d) = (layouts(m, k), layouts(k, n), layouts(m, n));
    text.operand("a", &mut problem.a, &of_a)?;
    text.operand("b", &mut problem.b, &of_b)?;
    text.optional("c", &mut problem.c, &of_d)?;
    scale(text, "scale_a", &mut problem.scale_a, &problem.batch, [m, k])?;
    scale(text, "scale_b", &mut problem.scale_b, &problem.batch, [n, k])?;
    text.factor("alpha", &mut problem.alpha, HostScalar::ONE)?;
    text.factor("beta", &mut problem.beta, HostScalar::ZERO)?;
    precision(text, &mut problem.precision, [problem.a.dtype, problem.b.dtype])?;
    determinism(text, &mut problem.determinism);
    epilogue(text, "+", &mut problem.epilogue, &of_d)?;
    text.operand("d", &mut problem.d, &of_d)
}

/// Packed stacks of matrices, and those that repeat rows or columns.
fn layouts(batch: &[u64], rows: u64, columns: u64) -> Layouts {
    let named = |name, row_stride, column_stride, is_packed: bool| {
        let mut stride = rows.saturating_mul(columns).max(1);
        let mut batch_strides = vec![0; batch.len()];
        for (place, extent) in batch_strides.iter_mut().zip(batch).rev().filter(|_| is_packed) {
            *place = stride;
            stride = stride.saturating_mul(*extent);
        }
        let mut matrix = Matrix { slot: Slot(0), dtype: DType::F32, row_stride, column_stride, batch_strides };
        matrix.normalize_strides(rows, columns);
        (name, matrix.all_strides())
    };
    vec![
        named("n", columns, 1, true),
        named("t", 1, rows, true),
        named("row", 0, 1, false),
        named("column", 1, 0, false),
        named("one", 0, 0, false),
    ]
}

/// Factors of an operand with so many rows (of B columns) and such a depth.
fn scale(text: &mut Text<'_>, name: &str, scale: &mut Option<Scale>, batch: &[u64], [rows, depth]: [u64; 2]) -> Result<(), Error> {
    let of = |outer, k| layouts(batch, blocks(rows, outer), blocks(depth, k));
    if !text.is_reading() {
        let word = match scale {
            None => return Ok(()),
            Some(Scale::Tensor { slot }) => text.print_slot("tensor", *slot),
            Some(Scale::Block { outer, k, factors }) => format!("block({outer},{k},{})", text.print_told(factors, &of(*outer, *k))),
        };
        text.value(name, Some(word));
        return Ok(());
    }
    let Some(word) = text.value(name, None) else { return Ok(()) };
    if let Some(slot) = text.parse_slot("tensor", &word) {
        *scale = Some(Scale::Tensor { slot });
        return Ok(());
    }
    let wrong = || error(format!("`{name}=` is `tensor` or `block(rows,depth,operand)`"), &word);
    let (Ok(outer), Ok(k), place) = (match call(&word)? {
        ("block", Some(parts)) if parts.len() == 3 => (parts[0].parse(), parts[1].parse(), parts[2]),
        _ => return Err(wrong()),
    }) else {
        return Err(wrong());
    };
    *scale = Some(Scale::Block { outer, k, factors: text.parse_place(place, &of(outer, k))? });
    Ok(())
}

/// Left out where it is what operands of these types usually have.
pub(super) fn precision(text: &mut Text<'_>, precision: &mut Precision, [a, b]: [DType; 2]) -> Result<(), Error> {
    text.choice("precision", precision, Precision::usual(a, b))
}

pub(super) fn determinism(text: &mut Text<'_>, determinism: &mut Determinism) {
    let mut is_repeatable = *determinism == Determinism::Repeatable;
    text.flag("repeatable", &mut is_repeatable);
    *determinism = if is_repeatable { Determinism::Repeatable } else { Determinism::Any };
}

/// Marks a step whose value is the right operand.
const REVERSED: &str = "reversed-";
/// Stands before the function of a step that draws its other operand.
const RANDOM: &str = "random-";
/// The offset of a random state that the host gives.
const OFFSET: &str = "offset";

pub(super) fn epilogue<P: Placed>(
    text: &mut Text<'_>,
    mark: &str,
    steps: &mut Vec<EpilogueStep<P>>,
    layouts: &Layouts,
) -> Result<(), Error> {
    let print = |text: &mut Text<'_>, step: &EpilogueStep<P>| match step {
        EpilogueStep::Unary(f) => Named(*f).print(),
        EpilogueStep::Binary { f, operand, v_is_right } => {
            let reversed = if *v_is_right { REVERSED } else { "" };
            format!("{reversed}{}({})", Named(*f).print(), text.print_told(operand, layouts))
        }
        EpilogueStep::Random { f, v_is_right, distribution, number, offset, through } => {
            let reversed = if *v_is_right { REVERSED } else { "" };
            let mut parts = vec![distribution.name().to_owned(), text.print_told(number, layouts)];
            parts.extend(offset.map(|offset| text.print_slot(OFFSET, offset)));
            parts.extend(through.iter().map(|f| Named(*f).print()));
            format!("{reversed}{RANDOM}{}({})", Named(*f).print(), parts.join(","))
        }
        EpilogueStep::Scale { factor } => format!("scale({})", text.print_factor(*factor)),
        EpilogueStep::Round { dtype } => format!("cast({dtype})"),
        EpilogueStep::Store { target } => format!("store({})", text.print_told(target, layouts)),
    };
    let parse = |text: &mut Text<'_>, word: &str| {
        let wrong = || error("a step of an epilogue: a function, `scale`, `cast` or `store`", word);
        Ok(match call(word)? {
            (name, None) => EpilogueStep::Unary(Named::<UnaryOp>::parse(name).ok_or_else(wrong)?.0),
            ("scale", Some(parts)) if parts.len() == 1 => EpilogueStep::Scale { factor: text.parse_factor(parts[0])? },
            ("cast", Some(parts)) if parts.len() == 1 => EpilogueStep::Round { dtype: parts[0].parse().map_err(|_| wrong())? },
            ("store", Some(parts)) if parts.len() == 1 => EpilogueStep::Store { target: text.parse_place(parts[0], layouts)? },
            (name, Some(parts)) if name.strip_prefix(REVERSED).unwrap_or(name).starts_with(RANDOM) && parts.len() >= 2 => {
                let (v_is_right, name) = name.strip_prefix(REVERSED).map_or((false, name), |name| (true, name));
                let f = Named::<BinaryOp>::parse(&name[RANDOM.len()..]).ok_or_else(wrong)?.0;
                let distribution = Drawn::ALL.into_iter().find(|drawn| drawn.name() == parts[0]).ok_or_else(wrong)?;
                let number = text.parse_place(parts[1], layouts)?;
                let offset = parts.get(2).and_then(|part| text.parse_slot(OFFSET, part));
                let through = parts[2 + usize::from(offset.is_some())..].iter();
                let through = through.map(|part| Named::<UnaryOp>::parse(part).map(|named| named.0)).collect::<Option<_>>();
                EpilogueStep::Random { f, v_is_right, distribution, number, offset, through: through.ok_or_else(wrong)? }
            }
            (name, Some(parts)) if parts.len() == 1 => {
                let (v_is_right, name) = name.strip_prefix(REVERSED).map_or((false, name), |name| (true, name));
                let f = Named::<BinaryOp>::parse(name).ok_or_else(wrong)?.0;
                EpilogueStep::Binary { f, operand: text.parse_place(parts[0], layouts)?, v_is_right }
            }
            _ => return Err(wrong()),
        })
    };
    text.steps(mark, steps, print, parse)
}
