//! Which tensors of a graph a caller binds, and the check of what is bound to them: one rule for all devices.

use verdigris_tensor::{BindingError, BindingRule, DType};

use crate::graph::Graph;
use crate::tensor::{TensorDesc, Uid};

/// A tensor that the caller binds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BoundTensor {
    /// Its uid in the graph.
    pub uid: Uid,
    /// Its name in the graph.
    pub name: String,
    /// The element type. A host scalar of an integer type is bound to an integer that the type holds, any other to a real number.
    pub dtype: DType,
    /// A host scalar, bound by value.
    pub is_scalar: bool,
    /// Whether the graph writes it.
    pub is_written: bool,
    /// Bytes from its first element to its last; 0 for a host scalar.
    pub bytes: u64,
    /// A multiple of this is its address, for the chosen ways.
    pub alignment_bytes: u64,
    /// A multiple of this is its address at least: less than `alignment_bytes` where the graph declares nothing and another setting serves.
    pub least_alignment_bytes: u64,
}

impl BoundTensor {
    fn new(tensor: &TensorDesc, is_written: bool) -> BoundTensor {
        let span_bytes = if tensor.by_value { 0 } else { tensor.layout.span_bytes(tensor.dtype) };
        BoundTensor {
            uid: tensor.uid,
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            is_scalar: tensor.by_value,
            is_written,
            bytes: u64::try_from(span_bytes).unwrap_or(u64::MAX),
            alignment_bytes: 1,
            least_alignment_bytes: 1,
        }
    }

    fn error(&self, given: impl Into<String>, rule: BindingRule) -> BindingError {
        BindingError::new(&self.name, self.wanted(), given, rule)
    }

    fn wanted(&self) -> String {
        if self.is_scalar { format!("a host scalar of {}", self.dtype) } else { format!("memory of {} bytes", self.bytes) }
    }

    /// Whether it is a host scalar whose type holds the number.
    fn takes(&self, number: Given) -> bool {
        match (number, self.dtype.integer_range()) {
            (Given::Real, None) => self.is_scalar,
            (Given::Integer(value), Some((least, greatest))) => self.is_scalar && (least.into()..=greatest.into()).contains(&value),
            _ => false,
        }
    }
}

/// The tensors that a caller binds: those that are stored and that some op reads or writes, in the order of the graph's list. They need no
/// alignment yet; a plan says what it relies on.
pub fn bound_tensors(graph: &Graph) -> Vec<BoundTensor> {
    let written: std::collections::HashSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    let read: std::collections::HashSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
    let is_bound = |tensor: &&TensorDesc| !tensor.is_virtual && (written.contains(&tensor.uid) || read.contains(&tensor.uid));
    graph.tensors.iter().filter(is_bound).map(|tensor| BoundTensor::new(tensor, written.contains(&tensor.uid))).collect()
}

/// What a tensor is bound to, as far as it can be seen without touching it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Given {
    /// Memory.
    Memory {
        /// The address of the first element.
        address: u64,
        /// Bytes from there on.
        bytes: u64,
        /// What may be done with it.
        access: Allowed,
    },
    /// A real number.
    Real,
    /// An integer.
    Integer(i128),
}

/// What may be done with memory that is bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allowed {
    /// It is only read.
    Read,
    /// It is written, and nobody else's meanwhile.
    Write,
    /// Either: its owner does not tell.
    Any,
}

/// Checks `count` bindings, of which `given` gives each by its number: that each tensor is bound once and nothing else is, kinds, access,
/// lengths, null pointers, alignments. `placed` hears for each tensor which binding is its own. Bindings in the order of the tensors are
/// found at once.
///
/// Gives the first tensor whose address is a multiple of its least alignment alone. Allocates nothing.
///
/// # Errors
/// The first rule that is broken, with the tensor.
pub fn check(
    tensors: &[BoundTensor],
    count: usize,
    given: impl Fn(usize) -> (Uid, Given),
    mut placed: impl FnMut(usize, usize),
) -> Result<Option<usize>, BindingError> {
    let mut loose = None;
    for (place, tensor) in tensors.iter().enumerate() {
        let found = match place < count && given(place).0 == tensor.uid {
            true => Some(place),
            false => (0..count).find(|&number| given(number).0 == tensor.uid),
        };
        let Some(found) = found else { return Err(tensor.error("nothing", BindingRule::Missing)) };
        placed(place, found);
        match given(found).1 {
            number @ (Given::Real | Given::Integer(_)) if tensor.takes(number) => {}
            number @ (Given::Real | Given::Integer(_)) => {
                let words = if let Given::Integer(value) = number { format!("the integer {value}") } else { "a real number".to_owned() };
                return Err(tensor.error(words, if tensor.is_scalar { BindingRule::Number } else { BindingRule::Kind }));
            }
            Given::Memory { .. } if tensor.is_scalar => return Err(tensor.error("memory", BindingRule::Kind)),
            Given::Memory { address, bytes, access } => {
                if access == if tensor.is_written { Allowed::Read } else { Allowed::Write } {
                    return Err(access_error(tensor));
                }
                if bytes < tensor.bytes {
                    return Err(tensor.error(format!("{bytes} bytes"), BindingRule::Length));
                }
                if address == 0 && tensor.bytes > 0 {
                    return Err(tensor.error("a null pointer", BindingRule::Null));
                }
                if !address.is_multiple_of(tensor.alignment_bytes) {
                    if !address.is_multiple_of(tensor.least_alignment_bytes) {
                        return Err(alignment_error(&tensor.name, address, tensor.least_alignment_bytes));
                    }
                    loose.get_or_insert(place);
                }
            }
        }
    }
    if count == tensors.len() { Ok(loose) } else { Err(superfluous(tensors, count, given)) }
}

fn access_error(tensor: &BoundTensor) -> BindingError {
    let (wanted, given) = if tensor.is_written { ("written", "only read") } else { ("only read", "written") };
    BindingError::new(&tensor.name, format!("memory that is {wanted}"), format!("memory that is {given}"), BindingRule::Access)
}

/// An address that is no multiple of what is relied on.
pub fn alignment_error(name: &str, address: u64, alignment_bytes: u64) -> BindingError {
    BindingError::new(name, format!("a multiple of {alignment_bytes} bytes"), format!("{address:#x}"), BindingRule::Alignment)
}

/// A uid that the plan does not bind: no tensor of the graph, a virtual one, or one that no op reads or writes.
pub fn unknown_error(uid: Uid) -> BindingError {
    BindingError::new(uid.to_string(), "nothing", "something", BindingRule::Unknown)
}

/// There are more bindings than tensors, and each tensor has its own.
fn superfluous(tensors: &[BoundTensor], count: usize, given: impl Fn(usize) -> (Uid, Given)) -> BindingError {
    let known = |uid: Uid| tensors.iter().find(|tensor| tensor.uid == uid);
    for number in 0..count {
        let uid = given(number).0;
        match known(uid) {
            None => return unknown_error(uid),
            Some(tensor) if (0..number).any(|earlier| given(earlier).0 == uid) => {
                return BindingError::new(&tensor.name, "one binding", "two", BindingRule::Twice);
            }
            Some(_) => {}
        }
    }
    // A list that is longer than the tensors has one of these.
    unknown_error(Uid(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::GraphBuilder;
    use crate::op::HostScalar;
    use verdigris_tensor::{DType, Layout};

    fn tensors() -> Vec<BoundTensor> {
        let mut g = GraphBuilder::new("scale");
        let x = g.tensor("x", DType::F32, Layout::row_major(&[2, 3]).expect("small"));
        g.tensor("unused", DType::F32, Layout::row_major(&[2]).expect("small"));
        let factor = g.host_scalar("factor", DType::F32);
        let y = g.unary("negate", crate::UnaryOp::Neg, x).expect("fits");
        let y = g.scale("scale", y, HostScalar::Bound(factor)).expect("fits");
        g.store(y, "y", DType::F16).expect("stores");
        let mut tensors = bound_tensors(&g.finish().expect("valid"));
        (tensors[0].alignment_bytes, tensors[0].least_alignment_bytes) = (16, 4);
        tensors
    }

    #[test]
    fn what_is_stored_and_used_is_bound() {
        let tensors = tensors();
        let facts: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), t.is_scalar, t.is_written, t.bytes)).collect();
        assert_eq!(facts, [("x", false, false, 24), ("factor", true, false, 0), ("y", false, true, 12)]);
    }

    #[test]
    fn each_rule_is_named_with_what_is_wanted_and_given() {
        let tensors = tensors();
        let memory = |address, bytes, access| Given::Memory { address, bytes, access };
        let good = [
            (tensors[0].uid, memory(0x1000, 24, Allowed::Read)),
            (tensors[1].uid, Given::Real),
            (tensors[2].uid, memory(0x2000, 12, Allowed::Any)),
        ];
        let run = |list: &[(Uid, Given)]| {
            let mut places = vec![usize::MAX; tensors.len()];
            check(&tensors, list.len(), |i| list[i], |tensor, number| places[tensor] = number).map(|loose| (loose, places))
        };
        assert_eq!(run(&good), Ok((None, vec![0, 1, 2])));
        assert_eq!(run(&[good[2], good[0], good[1]]), Ok((None, vec![1, 2, 0])));
        let with = |place: usize, given: Given| {
            let mut list = good;
            list[place].1 = given;
            run(&list)
        };
        assert_eq!(with(0, memory(0x1004, 24, Allowed::Read)), Ok((Some(0), vec![0, 1, 2])), "aligned as far as it must be");
        let refused = |result: Result<_, BindingError>| result.expect_err("does not suit");
        let said = |result| {
            let error = refused(result);
            (error.name, error.wanted, error.given, error.rule)
        };
        let words = |name: &str, wanted: &str, given: &str, rule| (name.to_owned(), wanted.to_owned(), given.to_owned(), rule);
        assert_eq!(said(run(&good[..2])), words("y", "memory of 12 bytes", "nothing", BindingRule::Missing));
        let mut more = good.to_vec();
        more.push((Uid(99), Given::Real));
        assert_eq!(refused(run(&more)).rule, BindingRule::Unknown);
        more[3] = good[1];
        assert_eq!(said(run(&more)), words("factor", "one binding", "two", BindingRule::Twice));
        assert_eq!(said(with(0, Given::Real)), words("x", "memory of 24 bytes", "a real number", BindingRule::Kind));
        assert_eq!(said(with(1, good[0].1)), words("factor", "a host scalar of f32", "memory", BindingRule::Kind));
        assert_eq!(said(with(1, Given::Integer(7))), words("factor", "a host scalar of f32", "the integer 7", BindingRule::Number));
        assert_eq!(said(with(0, Given::Integer(7))), words("x", "memory of 24 bytes", "the integer 7", BindingRule::Kind));
        let short = said(with(0, memory(0x1000, 23, Allowed::Read)));
        assert_eq!(short, words("x", "memory of 24 bytes", "23 bytes", BindingRule::Length));
        assert_eq!(refused(with(0, memory(0, 24, Allowed::Any))).rule, BindingRule::Null);
        assert_eq!(refused(with(0, memory(0x1000, 24, Allowed::Write))).rule, BindingRule::Access);
        assert_eq!(refused(with(2, memory(0x2000, 12, Allowed::Read))).rule, BindingRule::Access);
        let odd = said(with(0, memory(0x1002, 24, Allowed::Read)));
        assert_eq!(odd, words("x", "a multiple of 4 bytes", "0x1002", BindingRule::Alignment));
    }

    #[test]
    fn an_integer_is_one_that_its_type_holds() {
        for dtype in [DType::I8, DType::U8, DType::I32, DType::I64] {
            let (least, greatest) =
                dtype.integer_range().map(|(least, greatest)| (i128::from(least), i128::from(greatest))).expect("integers");
            let tensors = [BoundTensor { dtype, ..tensors()[1].clone() }];
            let bind = |given| check(&tensors, 1, |_| (tensors[0].uid, given), |_, _| ());
            let refused = |given, words: String| {
                let wanted = BindingError::new("factor", format!("a host scalar of {dtype}"), words, BindingRule::Number);
                assert_eq!(bind(given), Err(wanted));
            };
            for value in [least, 0, 1, greatest] {
                assert_eq!(bind(Given::Integer(value)), Ok(None), "{value} as {dtype}");
            }
            for value in [least - 1, greatest + 1, i128::from(u64::MAX)] {
                refused(Given::Integer(value), format!("the integer {value}"));
            }
            refused(Given::Real, "a real number".to_owned());
        }
    }
}
