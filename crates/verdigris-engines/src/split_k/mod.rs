//! Split-K: how the parts of a sum that several CTAs share are added up, always in the same order.
//!
//! `fixup`: the last CTA to arrive adds the parts, in the launch of the product. `reduction`: a launch of its own does. `cluster` and
//! `cluster_reduction`: the CTAs of a cluster send each other slices, or read each other's sums, and nothing goes to memory.
//! `filter`: launches of their own for filter gradients.

pub(crate) mod cluster;
pub(crate) mod cluster_reduction;
pub(crate) mod filter;
pub(crate) mod fixup;
pub(crate) mod reduction;

/// The most scratch for the parts of a sum that launches of their own add up.
pub(crate) const MOST_PARTS_BYTES: u64 = 512 << 20;
