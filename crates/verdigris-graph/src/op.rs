//! The closed set of operations, and the scalars that attributes are made of.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::ops::names::*;
use crate::spec::OpSpec;
use crate::tensor::Uid;

/// What each op says of itself; the crates that run it ask for more.
pub(crate) trait Operation {
    /// Its line of the table.
    const SPEC: OpSpec;

    /// Shows every uid: inputs in the order of the fields, then outputs, the main result first.
    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid));

    /// Checks the op against its own rules; `op` is its name in errors.
    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error>;

    /// The tensor written that lies where one that is read does, and that one.
    fn in_place(&self) -> Option<(Uid, Uid)> {
        None
    }

    /// The rule of differentiation: from the gradients of what the op writes, those of what it reads.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error>;
}

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One operation with its attributes and the tensors it reads and writes.
        #[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Op {
            $($(#[$doc])* $name($name),)*
        }

        /// The description of every op.
        pub static SPECS: &[OpSpec] = &[$($name::SPEC,)*];

        impl Op {
            /// Shows every uid to `visit`: inputs in the order of the op's fields, then outputs, the main result first.
            pub fn visit_uids(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
                match self {
                    $(Op::$name(op) => op.visit(visit),)*
                }
            }

            /// What this op is, as data.
            pub fn spec(&self) -> &'static OpSpec {
                match self {
                    $(Op::$name(_) => const { &$name::SPEC },)*
                }
            }

            /// The tensor written that lies where one that is read does, and that one: on a GPU they are bound to the same memory.
            pub fn in_place(&self) -> Option<(Uid, Uid)> {
                match self {
                    $(Op::$name(this) => this.in_place(),)*
                }
            }

            pub(crate) fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
                match self {
                    $(Op::$name(this) => this.check(op, graph),)*
                }
            }

            pub(crate) fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
                match self {
                    $(Op::$name(op) => op.differentiate(at),)*
                }
            }
        }
    };
}
crate::each_op!(ops);

/// Whether an op reads or writes a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Read.
    Input,
    /// Written.
    Output,
}

impl Op {
    fn uids(&self, role: Role) -> Vec<Uid> {
        let mut uids = Vec::new();
        self.clone().visit_uids(&mut |this, uid| {
            if this == role {
                uids.push(*uid);
            }
        });
        uids
    }

    /// The tensors read, in the order of the op's fields; one that is read twice is listed twice.
    pub fn inputs(&self) -> Vec<Uid> {
        self.uids(Role::Input)
    }

    /// The tensors written, the main result first.
    pub fn outputs(&self) -> Vec<Uid> {
        self.uids(Role::Output)
    }

    /// The main result: the first of [`Op::outputs`].
    pub fn output(&self) -> Uid {
        self.outputs()[0]
    }
}

/// A finite attribute value. Compared and hashed by its bits, so that it can be part of a fingerprint (−0 is not 0).
#[derive(Clone, Copy, Debug)]
pub struct Real(pub f64);

/// In JSON infinities, which it has no numbers for, are the words `inf` and `-inf`.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum RealText {
    Number(f64),
    Infinity(Infinity),
}

#[derive(Serialize, Deserialize)]
enum Infinity {
    #[serde(rename = "inf")]
    Above,
    #[serde(rename = "-inf")]
    Below,
}

impl Serialize for Real {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let text = match self.0 {
            f64::INFINITY => RealText::Infinity(Infinity::Above),
            f64::NEG_INFINITY => RealText::Infinity(Infinity::Below),
            number => RealText::Number(number),
        };
        text.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Real, D::Error> {
        Ok(Real(match RealText::deserialize(from)? {
            RealText::Number(number) => number,
            RealText::Infinity(Infinity::Above) => f64::INFINITY,
            RealText::Infinity(Infinity::Below) => f64::NEG_INFINITY,
        }))
    }
}

impl PartialEq for Real {
    fn eq(&self, other: &Real) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Real {}

impl Hash for Real {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl fmt::Display for Real {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A factor that the host knows: fixed in the graph, or bound by value at each execution, as a real number or as an integer. Arithmetic reads an
/// integer factor as it reads integer elements: rounded to the type that is computed in. `Id` is [`Uid`] in a graph and [`crate::Slot`] in a problem.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostScalar<Id> {
    /// The same at every execution.
    Fixed(Real),
    /// Passed at execution.
    Bound(Id),
}

impl<Id> HostScalar<Id> {
    /// The constant 1.
    pub const ONE: HostScalar<Id> = HostScalar::Fixed(Real(1.0));
    /// The constant 0.
    pub const ZERO: HostScalar<Id> = HostScalar::Fixed(Real(0.0));

    /// Whether this is fixed and equal to `value` (0 equals −0 here).
    pub fn is_fixed(&self, value: f64) -> bool {
        matches!(self, HostScalar::Fixed(real) if real.0 == value)
    }
}
