//! The table of fusions.
//!
//! A row says which op may come to a part that has an op of a certain kind, under which conditions, and what it becomes there. Rows are tried
//! from top to bottom: those of the first three kinds for each op of these in the order of the graph, those of maps after all of them. Another
//! fusion is another row; where its ops are not found by a [`Walk`] that there is, one more of these (`cut.rs`) finds them, and the part's own
//! file makes its problem.

use crate::error::Error;
use crate::op::Op;
use crate::ops::conv::ConvDirection;
use crate::ops::movement::Movement;
use crate::ops::pointwise::Pointwise;
use verdigris_tensor::DType;

use super::cut::{Cut, Site};

/// One way in which an op comes to a part.
pub(super) struct Fusion {
    /// Its name in explanations.
    pub(super) name: &'static str,
    /// The op whose part it is.
    pub(super) host: Host,
    /// Which op may come.
    pub(super) pattern: &'static str,
    /// How it is found. Neighbouring rows of one walk are alternatives: the first whose conditions hold is taken.
    pub(super) walk: Walk,
    /// All of these hold. That no third part has to run between the two is asked last, of every fusion.
    pub(super) conditions: &'static [Condition],
    /// What it is then.
    pub(super) becomes: &'static str,
}

/// The op that gives a part its kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Host {
    Matmul,
    Conv,
    Reduction,
    /// A pointwise op or a copy that nothing of the above has taken.
    Map,
}

/// Where ops are looked for that may come to a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Walk {
    /// From the host's result from reader to reader.
    Behind,
    /// From a convolution's activations from writer to writer.
    Activations,
    /// From a reduction's operand to all writers of all operands.
    Ahead,
    /// A sum of a convolution's result, a square of it and the sum of this, all or none.
    Sums,
    /// The writer of each operand.
    Operands,
    /// The ops that read the same.
    Readers,
}

/// Something that must hold for a fusion, in words that end the sentence "they stand together only if".
pub(super) struct Condition {
    pub(super) rule: &'static str,
    pub(super) holds: fn(&mut Cut<'_>, &Site<'_>) -> Result<bool, Error>,
}

/// What is said where everything holds but this.
pub(super) const NOTHING_BETWEEN: &str = "no third part has to run between them";

pub(super) const FUSIONS: &[Fusion] = &[
    Fusion {
        name: "gemm.epilogue",
        host: Host::Matmul,
        pattern: "a pointwise op behind a product",
        walk: Walk::Behind,
        conditions: &[
            ONE_READER,
            STORED_IS_FEW,
            STORED_IS_NO_INTEGER,
            POINTWISE,
            READ_ONCE,
            BEGIN_BUFFERS,
            DIMS_OF_VALUE,
            IN_EPILOGUE,
            DRAWN_HERE,
            DRAWN_IS_FEW,
            ALONE,
            SMALL,
        ],
        becomes: "a step of the epilogue, which draws the random numbers that it reads; a result on the way that is stored becomes an auxiliary output",
    },
    Fusion {
        name: "conv.prologue",
        host: Host::Conv,
        pattern: "a pointwise op that makes a convolution's activations",
        walk: Walk::Activations,
        conditions: &[VALUE_UNSTORED, ONE_READER, ALONE, POINTWISE, IN_EPILOGUE, IN_PROLOGUE, SMALL],
        becomes: "a step of the prologue, which ends where a value of the activations' type is loaded",
    },
    Fusion {
        name: "conv.epilogue",
        host: Host::Conv,
        pattern: "a pointwise op behind a convolution",
        walk: Walk::Behind,
        conditions: &[
            ONE_READER,
            STORED_IS_FEW,
            STORED_IS_NO_INTEGER,
            POINTWISE,
            READ_ONCE,
            BEGIN_BUFFERS,
            DIMS_OF_VALUE,
            IN_EPILOGUE,
            NOT_DRAWN,
            ALONE,
            SMALL,
        ],
        becomes: "a step of the epilogue; a result on the way that is stored becomes an auxiliary output",
    },
    Fusion {
        name: "conv.statistics",
        host: Host::Conv,
        pattern: "the sums of a convolution's result and of its square over all but the channels",
        walk: Walk::Sums,
        conditions: &[NOT_WGRAD, STORED_FLOAT, IN_LINES, READ_ELSEWHERE],
        becomes: "sums that the epilogue forms, as a batch norm asks for",
    },
    Fusion {
        name: "reduction.before",
        host: Host::Reduction,
        pattern: "a pointwise op that makes what is reduced, for nobody else",
        walk: Walk::Ahead,
        conditions: &[POINTWISE, DIMS_REDUCED, FOR_THIS_ALONE, ALONE, SMALL],
        becomes: "a step before the sum",
    },
    Fusion {
        name: "reduction.stored",
        host: Host::Reduction,
        pattern: "a pointwise op that makes what is reduced, and that others read",
        walk: Walk::Ahead,
        conditions: &[POINTWISE, DIMS_REDUCED, OTHERS_COULD_NOT, OPERANDS_STAND, ALONE, SMALL, NOT_READ_BACK],
        becomes: "a step before the sum whose result is stored on the way",
    },
    Fusion {
        name: "reduction.after",
        host: Host::Reduction,
        pattern: "a pointwise op behind a reduction",
        walk: Walk::Behind,
        conditions: &[ONE_READER, POINTWISE, READ_ONCE, BEGIN_BUFFERS, DIMS_OF_VALUE, NOT_WRITTEN_HERE, ALONE, SMALL],
        becomes: "a step behind the sum",
    },
    Fusion {
        name: "map.chain",
        host: Host::Map,
        pattern: "a pointwise op or a copy and one that makes an operand of it",
        walk: Walk::Operands,
        conditions: &[MAPS, DIMS_OF_RESULTS, BOTH_SMALL, NOT_READ_BACK],
        becomes: "steps of one map, which writes what is stored or read elsewhere",
    },
    Fusion {
        name: "map.shared",
        host: Host::Map,
        pattern: "a pointwise op or a copy and one that reads the same tensor of more than one element",
        walk: Walk::Readers,
        conditions: &[MAPS, DIMS_OF_RESULTS, BOTH_SMALL, NOT_READ_BACK],
        becomes: "steps of one map, which reads it once",
    },
];

const ONE_READER: Condition =
    Condition { rule: "one op alone reads the value", holds: |cut, site| Ok(cut.web.readers(site.value).len() == 1) };

/// Most elements of a value that an epilogue stores on its way. It does that from registers, which takes longer than a launch that passes over all of them again
/// where these are many: on an H100, 2.0 ns for a thousand elements beside 1.4 and the launch (`bench/record/h100`, two linear layers).
const MOST_STORED_ON_THE_WAY: u64 = 1 << 22;

const STORED_IS_FEW: Condition = Condition {
    rule: "the value is virtual or has at most 4,194,304 elements: more are stored faster by a launch of their own",
    holds: |cut, site| {
        let elements = cut.dims(site.value).iter().fold(1_u64, |all, &dim| all.saturating_mul(dim));
        Ok(cut.web.tensor(site.value).is_virtual || elements <= MOST_STORED_ON_THE_WAY)
    },
};

// Behind a step, an epilogue has what it stores as an f32, which holds integers up to 2^24.
const STORED_IS_NO_INTEGER: Condition = Condition {
    rule: "the value is virtual or no i32: a sum of integers is stored exactly by a launch of its own alone",
    holds: |cut, site| {
        let tensor = cut.web.tensor(site.value);
        Ok(tensor.is_virtual || tensor.dtype != DType::I32)
    },
};

const POINTWISE: Condition = Condition { rule: "it is a pointwise op", holds: |cut, site| Ok(cut.pointwise(site.op).is_some()) };

const READ_ONCE: Condition = Condition {
    rule: "it reads the value as one operand only",
    holds: |cut, site| Ok(operands(cut, site).filter(|&tensor| tensor == site.value).count() == 1),
};

// What another part computes lies in memory then; the last condition sees to it that it can be computed before.
const BEGIN_BUFFERS: Condition = Condition {
    rule: "its other operands begin where their buffers do",
    holds: |cut, site| Ok(operands(cut, site).filter(|&tensor| tensor != site.value).all(|tensor| cut.offset(tensor) == 0)),
};

const DIMS_OF_VALUE: Condition = Condition {
    rule: "its result has the dims of the value",
    holds: |cut, site| Ok(cut.dims(cut.web.outputs(site.op)[0]) == cut.dims(site.value)),
};

const DIMS_REDUCED: Condition = Condition {
    rule: "its result has the dims of what is reduced",
    holds: |cut, site| Ok(cut.dims(site.value) == cut.dims(cut.web.inputs(site.host)[0])),
};

const DIMS_OF_RESULTS: Condition = Condition {
    rule: "their results, or the rows that they append, have the same dims",
    holds: |cut, site| Ok(cut.space(site.op) == cut.space(site.host)),
};

const IN_EPILOGUE: Condition = Condition {
    rule: "the kernels have the function, in the type that they compute in",
    holds: |cut, site| {
        let (Some(pointwise), Some(computed)) = (cut.pointwise(site.op), computed(cut, site)) else { return Ok(false) };
        let has_it = match pointwise {
            Pointwise::Unary { f, .. } => f.in_epilogue(),
            Pointwise::Binary { f, .. } => f.in_epilogue(),
            Pointwise::Scale { .. } => true,
            Pointwise::Ternary { .. } | Pointwise::GenIndex { .. } | Pointwise::Random { .. } => false,
        };
        let types = operands(cut, site).map(|tensor| cut.web.tensor(tensor).dtype);
        Ok(has_it && Pointwise::compute_dtype(types) == computed)
    },
};

// What only a map could draw would lie in memory, four bytes an element.
const DRAWN_HERE: Condition = Condition {
    rule: "random numbers that it reads, and functions of one operand on their way, are drawn in f32 for it alone, of four words that lie side by side or of the host's",
    holds: |cut, site| {
        let drawn = cut.drawn_for(site.op, site.value);
        let is_f32 = computed(cut, site) == Some(DType::F32);
        Ok(drawn.is_none_or(|ops| is_f32 && ops.iter().all(|&op| cut.is_drawn_alone(op))))
    },
};

/// Most random numbers that an epilogue draws. A pair of neighbours asks for a draw of four words there, and no product runs meanwhile: on an H200 some 16 ns for a
/// thousand numbers, where a map that reads the product again takes under 2 and a launch (`bench/record/h200`, suite `fused`).
const MOST_DRAWN: u64 = 1 << 18;

const DRAWN_IS_FEW: Condition = Condition {
    rule: "at most 262,144 random numbers are drawn: more are drawn faster by a launch of their own",
    holds: |cut, site| {
        let elements = cut.dims(site.value).iter().fold(1_u64, |all, &dim| all.saturating_mul(dim));
        Ok(elements <= MOST_DRAWN || cut.drawn_for(site.op, site.value).is_none())
    },
};

const NOT_DRAWN: Condition = Condition {
    rule: "it reads no random numbers, which are counted channel by channel and not by pixels",
    holds: |cut, site| Ok(cut.drawn_for(site.op, site.value).is_none()),
};

const IN_PROLOGUE: Condition = Condition {
    rule: "it has one operand, or one beside a vector over channels",
    holds: |cut, site| cut.step_of_prologue(site.op, site.host).map(|step| step.is_some()),
};

const VALUE_UNSTORED: Condition = Condition {
    rule: "the value is virtual, and no other way to see memory",
    holds: |cut, site| Ok(cut.web.tensor(site.value).is_virtual && !cut.is_view(site.value)),
};

const ALONE: Condition = Condition { rule: "nothing else has been fused with it", holds: |cut, site| Ok(cut.parts.is_alone(site.op)) };

const SMALL: Condition =
    Condition { rule: "the part has no more ops and tensors than a kernel takes", holds: |cut, site| Ok(cut.are_small(site)) };

const BOTH_SMALL: Condition = Condition {
    rule: "the two have, with what lies between them, no more ops and tensors than a kernel takes",
    holds: |cut, site| Ok(cut.both_are_small(site)),
};

const NOT_WGRAD: Condition = Condition {
    rule: "the convolution is no gradient of its filter",
    holds: |cut, site| Ok(!matches!(cut.web.op(site.host), Op::Conv(conv) if conv.direction == ConvDirection::Wgrad)),
};

const STORED_FLOAT: Condition = Condition {
    rule: "the result is of a floating-point type of at least 16 bits and has elements",
    holds: |cut, site| {
        let is_float = matches!(cut.web.tensor(site.value).dtype, DType::Bf16 | DType::F16 | DType::F32 | DType::F64);
        Ok(is_float && !cut.dims(site.value).contains(&0))
    },
};

const IN_LINES: Condition = Condition {
    rule: "the result and the activations lie in lines of channels",
    holds: |cut, site| {
        let Op::Conv(conv) = cut.web.op(site.host) else { return Ok(false) };
        let activations = cut.see(super::conv::activations(conv))?;
        let in_lines = activations.strides[1] == 1 || activations.dims[1] == 1;
        Ok(in_lines && cut.web.tensor(site.value).layout.strides()[1] == 1)
    },
};

const READ_ELSEWHERE: Condition = Condition {
    rule: "the result lies in memory in any case",
    holds: |cut, site| {
        let is_virtual = cut.web.tensor(site.value).is_virtual;
        let is_ours = |op: &usize| *op == site.op || site.along.contains(op);
        Ok(!is_virtual || !cut.web.readers(site.value).iter().all(is_ours))
    },
};

const FOR_THIS_ALONE: Condition = Condition {
    rule: "its result is virtual and nobody else reads it",
    holds: |cut, site| Ok(cut.web.tensor(site.value).is_virtual && cut.others_who_read(site).is_empty()),
};

// Who reads a result from memory could have computed it for himself, were he a map; what waits for the sum could not.
const OTHERS_COULD_NOT: Condition = Condition {
    rule: "who else reads its result is no pointwise op, or waits for the reduction",
    holds: |cut, site| {
        let mut could = cut.others_who_read(site);
        could.retain(|&reader| cut.pointwise(reader).is_some());
        Ok(could.into_iter().all(|reader| cut.parts.waits(&cut.web, reader, site.host) == Some(true)))
    },
};

// So that what is loaded and what is stored are accessed alike, and no map has to store an operand for this alone.
const OPERANDS_STAND: Condition = Condition {
    rule: "its operands lie as its result does, in memory in any case or made for it alone",
    holds: |cut, site| {
        let result = &cut.web.tensor(site.value).layout;
        let stands = |tensor: usize| {
            let lies_alike = cut.dims(tensor) != result.dims() || cut.see_number(tensor).strides == result.strides();
            let ours = cut.parts.of(site.host);
            let is_made_by_a_map =
                cut.web.producer(tensor).is_some_and(|writer| cut.pointwise(writer).is_some() && cut.parts.of(writer) != ours);
            lies_alike && (!is_made_by_a_map || !cut.web.tensor(tensor).is_virtual || cut.web.readers(tensor).len() == 1)
        };
        Ok(operands(cut, site).all(stands))
    },
};

// What is stored on the way is not read again by the same launch, of which no CTA waits for another.
const NOT_WRITTEN_HERE: Condition = Condition {
    rule: "the same part does not write its other operands",
    holds: |cut, site| {
        let mut others = operands(cut, site).filter(|&tensor| tensor != site.value);
        Ok(!others.any(|tensor| cut.writer_of_memory(tensor).is_some_and(|writer| cut.parts.of(writer) == cut.parts.of(site.host))))
    },
};

const NOT_READ_BACK: Condition = Condition {
    rule: "neither reads from memory, as copies and views do, what the other writes",
    holds: |cut, site| Ok(!cut.read_themselves(site)),
};

const MAPS: Condition = Condition {
    rule: "both are pointwise ops or copies that strides can say, in no other part",
    holds: |cut, site| Ok(cut.in_map(site.host) && cut.in_map(site.op)),
};

/// What the pointwise op reads by pointer, in the order of its fields.
fn operands<'c>(cut: &'c Cut<'_>, site: &Site<'_>) -> impl Iterator<Item = usize> + use<'c> {
    let uids = cut.pointwise(site.op).map(Pointwise::operands).unwrap_or_default();
    uids.into_iter().filter_map(|uid| cut.web.number(uid))
}

/// The type in which an epilogue computes.
fn computed(cut: &Cut<'_>, site: &Site<'_>) -> Option<DType> {
    match cut.web.op(site.host) {
        Op::Matmul(matmul) => Some(matmul.precision.epilogue()),
        Op::Conv(conv) => Some(conv.precision.epilogue()),
        _ => None,
    }
}

impl Host {
    /// The kind of part that an op gives.
    pub(super) fn of(op: &Op) -> Option<Host> {
        match op {
            Op::Matmul(_) => Some(Host::Matmul),
            Op::Conv(_) => Some(Host::Conv),
            Op::Reduction(_) => Some(Host::Reduction),
            Op::Pointwise(_) => Some(Host::Map),
            Op::Movement(Movement::Concat { .. }) => None,
            Op::Movement(_) | Op::Append(_) => Some(Host::Map),
            // Nothing joins the others; their parts are made in `rows`.
            _ => None,
        }
    }

    /// The rows of a kind, those of one walk together.
    pub(super) fn fusions(self) -> impl Iterator<Item = &'static [Fusion]> {
        FUSIONS.chunk_by(|a, b| (a.host, a.walk) == (b.host, b.walk)).filter(move |rows| rows[0].host == self)
    }
}
