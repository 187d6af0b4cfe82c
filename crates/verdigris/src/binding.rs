//! What a caller binds to a plan, and the one check of it: before anything runs, for all parts of a plan at once.
//!
//! What is the same on every device (that each tensor is bound once, kinds, lengths, null pointers, alignments) is checked by
//! [`verdigris_graph::binding`]; here stand the rules for memory of a GPU that several tensors share.
//!
//! See [`crate::plan`] for a plan that is run on such bindings.

use std::collections::HashMap;

use verdigris_cuda::{DeviceSlice, HostSlice};
use verdigris_graph::Uid;
use verdigris_graph::binding::{Allowed, BoundTensor, Given, check};
use verdigris_kir::execution::HostValue;
use verdigris_tensor::layout::ranges_overlap;
use verdigris_tensor::{BindingError, BindingRule};

/// So many find their bindings on the stack; an execution of more allocates a list.
pub(crate) const FEW_BOUND: usize = 1024;

/// What one tensor, or one slot of a problem, is bound to. Memory belongs to others; whoever made the slice vouches for it.
///
/// ```
/// use verdigris::{Binding, HostSlice};
///
/// assert!(matches!(Binding::from(0.5), Binding::Scalar(0.5)));
/// let bytes = [0; 16];
/// assert!(matches!(Binding::from(HostSlice::read(&bytes)), Binding::Host(slice) if slice.len_bytes() == 16));
/// ```
#[derive(Debug)]
pub enum Binding<'a> {
    /// Memory of a GPU, from the first element on.
    Buffer(DeviceSlice<'a>),
    /// Memory of the host, from the first element on.
    Host(HostSlice<'a>),
    /// A host scalar; rounded to f32 where kernels compute in f32.
    Scalar(f64),
    /// An integer host scalar, of an integer type that holds it.
    Integer(i64),
    /// As [`Binding::Integer`], for those beyond an `i64`: all 64 bits of a seed.
    Unsigned(u64),
}

impl<'a> From<DeviceSlice<'a>> for Binding<'a> {
    fn from(slice: DeviceSlice<'a>) -> Binding<'a> {
        Binding::Buffer(slice)
    }
}

impl<'a> From<HostSlice<'a>> for Binding<'a> {
    fn from(slice: HostSlice<'a>) -> Binding<'a> {
        Binding::Host(slice)
    }
}

impl From<HostValue> for Binding<'_> {
    fn from(value: HostValue) -> Self {
        match value {
            HostValue::Real(value) => Binding::Scalar(value),
            HostValue::Signed(value) => Binding::Integer(value),
            HostValue::Unsigned(value) => Binding::Unsigned(value),
        }
    }
}

impl From<f64> for Binding<'_> {
    fn from(value: f64) -> Self {
        Binding::Scalar(value)
    }
}

impl From<i64> for Binding<'_> {
    fn from(value: i64) -> Self {
        Binding::Integer(value)
    }
}

impl From<u64> for Binding<'_> {
    fn from(value: u64) -> Self {
        Binding::Unsigned(value)
    }
}

impl Binding<'_> {
    /// Puts it where a program finds it: memory of the GPU among the buffers, a number among the host scalars.
    pub(crate) fn lend<'b>(&'b self, buffer: &mut DeviceSlice<'b>, scalar: &mut HostValue) {
        match self {
            Binding::Buffer(slice) => *buffer = *slice,
            Binding::Scalar(value) => *scalar = HostValue::Real(*value),
            Binding::Integer(value) => *scalar = HostValue::Signed(*value),
            Binding::Unsigned(value) => *scalar = HostValue::Unsigned(*value),
            Binding::Host(_) => {}
        }
    }

    /// As a plan on a GPU sees it.
    fn on_gpu(&self) -> Given {
        match self {
            Binding::Buffer(slice) => Given::Memory { address: slice.address(), bytes: slice.len_bytes(), access: Allowed::Any },
            Binding::Host(slice) => Given::Memory { address: slice.address(), bytes: slice.len_bytes(), access: Allowed::Any },
            Binding::Scalar(_) => Given::Real,
            Binding::Integer(value) => Given::Integer((*value).into()),
            Binding::Unsigned(value) => Given::Integer((*value).into()),
        }
    }
}

/// Two bound tensors, of which at least the first is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pair {
    pub(crate) output: usize,
    pub(crate) other: usize,
    /// They may be one and the same memory.
    pub(crate) may_share: bool,
    /// They are one and the same memory: the output is written in place.
    pub(crate) must_share: bool,
}

/// A tensor bound to an address that is not aligned for the chosen ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Loose {
    pub(crate) place: usize,
    pub(crate) address: u64,
}

/// All that the caller of a GPU's plan binds, and the rules for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Bound {
    pub(crate) tensors: Vec<BoundTensor>,
    pub(crate) pairs: Vec<Pair>,
    place_of: HashMap<Uid, usize>,
}

/// For each bound tensor, its place among the bindings that an execution is given.
pub(crate) struct Places {
    few: [u16; FEW_BOUND],
    many: Vec<u16>,
    count: usize,
}

impl Places {
    pub(crate) fn for_all(&mut self) -> &mut [u16] {
        if self.many.is_empty() { &mut self.few[..self.count] } else { &mut self.many }
    }
}

impl Bound {
    pub(crate) fn of(tensors: Vec<BoundTensor>, pairs: Vec<Pair>) -> Bound {
        let place_of = tensors.iter().enumerate().map(|(place, tensor)| (tensor.uid, place)).collect();
        Bound { tensors, pairs, place_of }
    }

    /// The place of a tensor.
    pub(crate) fn place_of(&self, uid: Uid) -> Option<usize> {
        self.place_of.get(&uid).copied()
    }

    /// Room for the place of each tensor.
    pub(crate) fn places(&self) -> Places {
        let count = self.tensors.len();
        Places { few: [0; FEW_BOUND], many: if count > FEW_BOUND { vec![0; count] } else { Vec::new() }, count }
    }

    /// Finds each tensor's binding among `count`, and checks all of them. Gives the first tensor that is aligned for the loose ways alone.
    pub(crate) fn check<'b, 'a: 'b>(
        &self,
        count: usize,
        given: impl Fn(usize) -> (Uid, &'b Binding<'a>),
        places: &mut [u16],
    ) -> Result<Option<Loose>, BindingError> {
        let seen = |number: usize| {
            let (uid, binding) = given(number);
            (uid, binding.on_gpu())
        };
        let loose = check(&self.tensors, count, seen, |tensor, number| places[tensor] = number as u16)?;
        let range = |place: usize| match given(usize::from(places[place])).1 {
            Binding::Buffer(slice) => (slice.address(), u128::from(self.tensors[place].bytes)),
            Binding::Host(_) | Binding::Scalar(_) | Binding::Integer(_) | Binding::Unsigned(_) => (0, 0),
        };
        for (tensor, place) in self.tensors.iter().zip(&*places) {
            if let Binding::Host(_) = given(usize::from(*place)).1 {
                return Err(BindingError::new(&tensor.name, "memory of the GPU", "memory of the host", BindingRule::Device));
            }
        }
        let loose = loose.map(|place| Loose { place, address: range(place).0 });
        // Pairs are as many as outputs times tensors: of very many tensors that all lie apart none is looked at.
        let has_places = self.pairs.iter().any(|pair| pair.must_share);
        if self.tensors.len() > FEW_BOUND && !has_places && lie_apart((0..self.tensors.len()).map(range).collect()) {
            return Ok(loose);
        }
        for &Pair { output, other, may_share, must_share } in &self.pairs {
            let (a, b) = (range(output), range(other));
            if must_share && a.0 != b.0 && a.1 > 0 {
                return Err(place_error(&self.tensors[output].name, &self.tensors[other].name));
            }
            if ranges_overlap(a, b) && !(may_share && a.0 == b.0) {
                return Err(overlap_error(&self.tensors[output].name, &self.tensors[other].name));
            }
        }
        Ok(loose)
    }
}

/// An output that shares bytes with another tensor.
pub(crate) fn overlap_error(output: &str, other: &str) -> BindingError {
    BindingError::new(output, "memory of its own", format!("bytes that `{other}` shares"), BindingRule::Overlap)
}

/// An output that does not lie in the place that it is written in.
pub(crate) fn place_error(output: &str, other: &str) -> BindingError {
    BindingError::new(output, format!("the memory of `{other}`"), "other memory", BindingRule::InPlace)
}

/// Whether no two (address, bytes) share a byte.
fn lie_apart(mut ranges: Vec<(u64, u128)>) -> bool {
    ranges.retain(|&(_, bytes)| bytes > 0);
    ranges.sort_unstable();
    ranges.windows(2).all(|pair| u128::from(pair[0].0) + pair[0].1 <= u128::from(pair[1].0))
}
