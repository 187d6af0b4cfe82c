//! What autocast makes of a function's tensors.

/// A type that autocast casts to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Autocast {
    /// That of `torch.get_autocast_dtype` for the first two tensors, which are multiplied. Biases and statistics stay: they are added to sums that are wide
    /// anyway, and a bias that is not cast costs no launch and is not rounded.
    LowerOperands,
    /// The same for what two linear layers multiply: the input and both weights.
    LowerLayers,
    /// The same for queries, keys, values and the bias; slopes stay.
    LowerAttended,
    /// f32.
    F32,
}

impl Autocast {
    /// Whether it casts the tensor at a place.
    pub(crate) const fn casts(self, place: usize) -> bool {
        match self {
            Autocast::LowerOperands => place < 2,
            Autocast::LowerLayers => matches!(place, 0 | 1 | 3),
            Autocast::LowerAttended => place < 4,
            Autocast::F32 => true,
        }
    }

    /// Its word, as the package's Python half speaks of it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Autocast::LowerOperands => "lower operands",
            Autocast::LowerLayers => "lower layers",
            Autocast::LowerAttended => "lower attended",
            Autocast::F32 => "float32",
        }
    }
}
