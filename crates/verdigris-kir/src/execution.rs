//! What is known only when a program is executed: numbers from the host, lists of tensors, and grids that follow from both.
//!
//! A [`Program`](crate::program::Program) is made once and executed often. What changes from one execution to the next is named in it by index and given
//! beside it: numbers ([`HostValue`]), each read in the type of its parameter; lists of tensors ([`TensorList`]), of any length up to the declared one;
//! and grids ([`GridFunction`]), up to a declared greatest one, for which the program is verified and its scratch is laid out. The interpreter and the
//! driver ask the same rules here before anything runs.
//!
//! ```
//! use verdigris_kir::execution::{GridFunction, HostValue, Known};
//! use verdigris_kir::ir::Ty;
//!
//! // A seed keeps all of its bits, a factor is rounded, and what a parameter cannot hold is refused.
//! assert_eq!(HostValue::from(u64::MAX).bits(Ty::U64), Ok(u64::MAX));
//! assert_eq!(HostValue::from(0.1).bits(Ty::F32), Ok(u64::from(0.1f32.to_bits())));
//! assert_eq!(HostValue::from(-1i64).bits(Ty::U32).unwrap_err().to_string(), "-1 is given, a u32 is wanted");
//!
//! // As many CTAs as there are blocks of 256 among the elements that host scalar 0 counts.
//! let grid = GridFunction::new("blocks", |known: &Known<'_>| [known.unsigned(0).unwrap_or(0).div_ceil(256) as u32, 1, 1]);
//! let known = |elements: u64| [HostValue::from(elements)];
//! let of = |elements| grid.grid(&Known { scalars: &known(elements), list_lengths: &|_| None }, [8, 1, 1], 1);
//! assert_eq!(of(1000), Ok(Some([4, 1, 1])));
//! assert_eq!(of(0), Ok(None), "a grid without CTAs is no launch");
//! assert_eq!(of(10_000).unwrap_err().to_string(), "grid function `blocks` gives 40 CTAs along x, at most 8 are declared");
//! ```

use std::fmt;
use std::sync::Arc;

use crate::ir::Ty;

/// A number that the caller gives at execution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HostValue {
    /// For parameters of type f64, and of type f32, to which it is rounded.
    Real(f64),
    /// For integers, signed or not, that hold it, and for real numbers, to which it is rounded.
    Signed(i64),
    /// The same.
    Unsigned(u64),
}

impl From<f64> for HostValue {
    fn from(value: f64) -> Self {
        HostValue::Real(value)
    }
}

impl From<i64> for HostValue {
    fn from(value: i64) -> Self {
        HostValue::Signed(value)
    }
}

impl From<u64> for HostValue {
    fn from(value: u64) -> Self {
        HostValue::Unsigned(value)
    }
}

impl fmt::Display for HostValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostValue::Real(value) => write!(f, "{value:?}"),
            HostValue::Signed(value) => value.fmt(f),
            HostValue::Unsigned(value) => value.fmt(f),
        }
    }
}

/// A number that a parameter's type does not hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueMismatch {
    /// What was given.
    pub given: HostValue,
    /// The type of the parameter.
    pub wanted: Ty,
}

impl fmt::Display for ValueMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is given, {} is wanted", self.given, wanted(self.wanted))
    }
}

impl std::error::Error for ValueMismatch {}

/// What a parameter of that type takes, in words.
pub fn wanted(ty: Ty) -> &'static str {
    match ty {
        Ty::F32 => "a real number (f32)",
        Ty::F64 => "a real number (f64)",
        Ty::U32 => "a u32",
        Ty::S32 => "an i32",
        Ty::U64 => "a u64",
        Ty::S64 => "an i64",
        _ => "no number from the host",
    }
}

impl HostValue {
    /// Whether a parameter of that type may be given at execution.
    pub fn is_taken_by(ty: Ty) -> bool {
        matches!(ty, Ty::F32 | Ty::F64 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64)
    }

    /// The bits of a parameter of that type.
    ///
    /// # Errors
    /// A real number for an integer, or an integer that the type does not hold.
    #[inline]
    pub fn bits(self, ty: Ty) -> Result<u64, ValueMismatch> {
        let integer = match self {
            HostValue::Real(value) => {
                return match ty {
                    Ty::F32 => Ok(u64::from((value as f32).to_bits())),
                    Ty::F64 => Ok(value.to_bits()),
                    _ => Err(ValueMismatch { given: self, wanted: ty }),
                };
            }
            HostValue::Signed(value) => i128::from(value),
            HostValue::Unsigned(value) => i128::from(value),
        };
        let bits = match ty {
            Ty::F32 | Ty::F64 => return HostValue::Real(integer as f64).bits(ty),
            Ty::U32 => u32::try_from(integer).ok().map(u64::from),
            Ty::S32 => i32::try_from(integer).ok().map(|value| u64::from(value as u32)),
            Ty::U64 => u64::try_from(integer).ok(),
            Ty::S64 => i64::try_from(integer).ok().map(|value| value as u64),
            _ => None,
        };
        bits.ok_or(ValueMismatch { given: self, wanted: ty })
    }
}

/// A list of tensors that is bound at execution: how long it may be, and what each tensor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorList {
    /// What it is, in errors.
    pub name: &'static str,
    /// Most tensors.
    pub most: u32,
    /// Bytes of an element; a tensor is a whole number of them, and that number is its extent.
    pub element_bytes: u32,
    /// What each address is a multiple of, in bytes.
    pub alignment_bytes: u64,
}

/// What is wrong with a list of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListFault {
    /// More tensors than were declared.
    Length {
        /// How many there are.
        given: u64,
        /// The most.
        most: u32,
    },
    /// A tensor ends within an element.
    Bytes {
        /// Its place in the list.
        entry: u64,
        /// Its bytes.
        bytes: u64,
        /// Those of an element.
        element_bytes: u32,
    },
    /// A tensor's address is not aligned.
    Alignment {
        /// Its place in the list.
        entry: u64,
        /// Where it is.
        address: u64,
        /// What that must be a multiple of.
        alignment_bytes: u64,
    },
}

impl fmt::Display for ListFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListFault::Length { given, most } => write!(f, "{given} tensors are given, at most {most} are declared"),
            ListFault::Bytes { entry, bytes, element_bytes } => {
                write!(f, "tensor {entry} is of {bytes} bytes, no multiple of an element's {element_bytes}")
            }
            ListFault::Alignment { entry, address, alignment_bytes } => {
                write!(f, "tensor {entry} is at {address:#x}, no multiple of {alignment_bytes} bytes")
            }
        }
    }
}

impl std::error::Error for ListFault {}

impl TensorList {
    /// Checks `count` tensors, of which `given` gives the address and the bytes of each.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self, count: u64, given: impl Fn(usize) -> (u64, u64)) -> Result<(), ListFault> {
        if count > u64::from(self.most) {
            return Err(ListFault::Length { given: count, most: self.most });
        }
        for entry in 0..count {
            let (address, bytes) = given(entry as usize);
            if !bytes.is_multiple_of(u64::from(self.element_bytes)) {
                return Err(ListFault::Bytes { entry, bytes, element_bytes: self.element_bytes });
            }
            if !address.is_multiple_of(self.alignment_bytes) {
                return Err(ListFault::Alignment { entry, address, alignment_bytes: self.alignment_bytes });
            }
        }
        Ok(())
    }
}

/// What a grid may follow from.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// The host scalars, by index.
    pub scalars: &'a [HostValue],
    /// The length of each list, by index.
    pub list_lengths: &'a dyn Fn(usize) -> Option<u64>,
}

impl Known<'_> {
    /// A host scalar that is no negative integer.
    pub fn unsigned(&self, index: usize) -> Option<u64> {
        match self.scalars.get(index)? {
            HostValue::Unsigned(value) => Some(*value),
            HostValue::Signed(value) => u64::try_from(*value).ok(),
            HostValue::Real(_) => None,
        }
    }

    /// How many tensors a list has.
    pub fn list_length(&self, index: usize) -> Option<u64> {
        (self.list_lengths)(index)
    }
}

/// A grid that follows from what is given at execution: a pure function, so that equal bindings launch equal grids.
#[derive(Clone)]
pub struct GridFunction {
    name: &'static str,
    function: Arc<Function>,
}

type Function = dyn Fn(&Known<'_>) -> [u32; 3] + Send + Sync;

impl GridFunction {
    /// A function under a name for errors.
    pub fn new(name: &'static str, function: impl Fn(&Known<'_>) -> [u32; 3] + Send + Sync + 'static) -> Self {
        GridFunction { name, function: Arc::new(function) }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The grid, up to the declared one; `None` where it has no CTAs, and nothing is to be launched.
    ///
    /// # Errors
    /// A grid beyond the declared one, or one whose x is no multiple of the cluster.
    pub fn grid(&self, known: &Known<'_>, most: [u32; 3], cluster: u32) -> Result<Option<[u32; 3]>, GridFault> {
        let grid = (self.function)(known);
        for (axis, (given, most)) in ['x', 'y', 'z'].into_iter().zip(grid.into_iter().zip(most)) {
            if given > most {
                return Err(GridFault { name: self.name, axis, given, rule: GridRule::Most(most) });
            }
        }
        if !grid[0].is_multiple_of(cluster.max(1)) {
            return Err(GridFault { name: self.name, axis: 'x', given: grid[0], rule: GridRule::Cluster(cluster) });
        }
        Ok((!grid.contains(&0)).then_some(grid))
    }
}

impl fmt::Debug for GridFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GridFunction({})", self.name)
    }
}

/// A grid that a function gives and the program does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridFault {
    /// The function.
    pub name: &'static str,
    /// `x`, `y` or `z`.
    pub axis: char,
    /// CTAs along it.
    pub given: u32,
    /// What they break.
    pub rule: GridRule,
}

/// What a grid keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GridRule {
    /// At most so many CTAs are declared.
    Most(u32),
    /// A multiple of the cluster.
    Cluster(u32),
}

impl fmt::Display for GridFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GridFault { name, axis, given, rule } = self;
        write!(f, "grid function `{name}` gives {given} CTAs along {axis}, ")?;
        match rule {
            GridRule::Most(most) => write!(f, "at most {most} are declared"),
            GridRule::Cluster(cluster) => write!(f, "no multiple of the cluster's {cluster}"),
        }
    }
}

impl std::error::Error for GridFault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_in_the_type_of_its_parameter_or_refused() {
        let of = |value: HostValue, ty| value.bits(ty).ok();
        assert_eq!(of(HostValue::Real(0.1), Ty::F32), Some(u64::from(0.1f32.to_bits())));
        assert_eq!(of(HostValue::Real(0.1), Ty::F64), Some(0.1f64.to_bits()));
        assert_eq!(of(HostValue::Signed(-2), Ty::S32), Some(0xffff_fffe));
        assert_eq!(of(HostValue::Signed(-2), Ty::S64), Some(u64::MAX - 1));
        assert_eq!(of(HostValue::Unsigned(1 << 63), Ty::U64), Some(1 << 63));
        // Either kind of integer, where the type holds it.
        assert_eq!((of(HostValue::Signed(7), Ty::U32), of(HostValue::Unsigned(7), Ty::S32)), (Some(7), Some(7)));
        assert_eq!(of(HostValue::Unsigned(3), Ty::F32), Some(u64::from(3.0f32.to_bits())));
        assert_eq!(of(HostValue::Signed(-3), Ty::F64), Some((-3.0f64).to_bits()));
        for (value, ty) in [
            (HostValue::Real(1.0), Ty::U64),
            (HostValue::Unsigned(1 << 32), Ty::U32),
            (HostValue::Unsigned(1 << 31), Ty::S32),
            (HostValue::Unsigned(1 << 63), Ty::S64),
            (HostValue::Signed(-1), Ty::U64),
            (HostValue::Real(1.0), Ty::F16),
        ] {
            assert_eq!(value.bits(ty), Err(ValueMismatch { given: value, wanted: ty }));
            assert!(HostValue::is_taken_by(ty) != (ty == Ty::F16));
        }
    }

    #[test]
    fn lists_keep_length_elements_and_alignment() {
        let list = TensorList { name: "tensors", most: 2, element_bytes: 4, alignment_bytes: 16 };
        let check = |entries: &[(u64, u64)]| list.check(entries.len() as u64, |entry| entries[entry]).map_err(|fault| fault.to_string());
        assert_eq!((check(&[]), check(&[(0, 0), (32, 8)])), (Ok(()), Ok(())));
        assert_eq!(check(&[(0, 4); 3]).unwrap_err(), "3 tensors are given, at most 2 are declared");
        assert_eq!(check(&[(0, 4), (16, 6)]).unwrap_err(), "tensor 1 is of 6 bytes, no multiple of an element's 4");
        assert_eq!(check(&[(8, 4)]).unwrap_err(), "tensor 0 is at 0x8, no multiple of 16 bytes");
    }

    #[test]
    fn grids_stay_within_what_is_declared() {
        let given = GridFunction::new("given", |known: &Known<'_>| std::array::from_fn(|axis| known.unsigned(axis).unwrap_or(0) as u32));
        let grid = |x: u64, y: u64, cluster| {
            let scalars = [x.into(), y.into(), HostValue::Signed(1)];
            given.grid(&Known { scalars: &scalars, list_lengths: &|_| None }, [8, 2, 1], cluster)
        };
        assert_eq!((grid(8, 2, 4), grid(3, 1, 1), grid(8, 0, 2)), (Ok(Some([8, 2, 1])), Ok(Some([3, 1, 1])), Ok(None)));
        let fault = |axis, given, rule| Err(GridFault { name: "given", axis, given, rule });
        assert_eq!(grid(9, 1, 1), fault('x', 9, GridRule::Most(8)));
        assert_eq!(grid(8, 3, 1), fault('y', 3, GridRule::Most(2)));
        assert_eq!(grid(6, 1, 4), fault('x', 6, GridRule::Cluster(4)));
        let by_list = GridFunction::new("by list", |known: &Known<'_>| [known.list_length(1).unwrap_or(0) as u32, 1, 1]);
        let known = Known { scalars: &[], list_lengths: &|list| (list == 1).then_some(5) };
        assert_eq!(by_list.grid(&known, [8, 1, 1], 1), Ok(Some([5, 1, 1])));
    }
}
