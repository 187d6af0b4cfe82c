//! Channel and pixel shuffles: reshapes around a transpose, of which one copy is made, whatever the memory formats.
//!
//! With `r` the factor, `g` the number of groups and `c` the channels of the result, over the last dims of a tensor:
//!
//! ```text
//! pixel shuffle     y[…, c, h·r + i, w·r + j] = x[…, (c·r + i)·r + j, h, w]
//! pixel unshuffle   y[…, (c·r + i)·r + j, h, w] = x[…, c, h·r + i, w·r + j]
//! channel shuffle   y[n, k·g + i, …] = x[n, i·(c / g) + k, …]
//! ```
//!
//! Pixel shuffle is the sub-pixel convolution's last step (Shi and others, 2016), channel shuffle ShuffleNet's (Zhang and others, 2018). Each is a
//! permutation of elements, so its gradient is the way back, which the rules of its ops draw.

use crate::error::Error;
use crate::graph::GraphBuilder;
use crate::tensor::Uid;
use crate::validate::attribute;

impl GraphBuilder {
    /// Channels to pixels: `[…, c · r², h, w]` becomes `[…, c, h · r, w · r]`, as a virtual tensor of the type of `x`.
    ///
    /// ```
    /// use verdigris_graph::GraphBuilder;
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let mut g = GraphBuilder::new("larger");
    /// let x = g.tensor("x", DType::Bf16, Layout::row_major(&[2, 12, 5, 7])?);
    /// let y = g.pixel_shuffle("shuffle", x, 2)?;
    /// assert_eq!(g.dims(y), Some(vec![2, 3, 10, 14]));
    /// let back = g.pixel_unshuffle("unshuffle", y, 2)?;
    /// assert_eq!(g.dims(back), Some(vec![2, 12, 5, 7]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A factor of 0, fewer than three dims, channels that are no multiple of `r²`, an unknown uid.
    pub fn pixel_shuffle(&mut self, name: &str, x: Uid, factor: u64) -> Result<Uid, Error> {
        let (lead, [channels, height, width]) = self.last_dims(name, x)?;
        let square = factor.checked_mul(factor).filter(|&square| square > 0 && channels.is_multiple_of(square));
        let Some(square) = square else {
            return attribute(name, "factor", factor, "channels are a multiple of the factor's square, and the factor is at least 1");
        };
        let rank = lead.len() as u32;
        let split = [&lead[..], &[channels / square, factor, factor, height, width]].concat();
        let whole = [&lead[..], &[channels / square, grown(name, height, factor)?, grown(name, width, factor)?]].concat();
        self.permuted(name, x, &split, rank, [0, 3, 1, 4, 2], &whole)
    }

    /// Pixels to channels, the way back of [`GraphBuilder::pixel_shuffle`]: `[…, c, h · r, w · r]` becomes `[…, c · r², h, w]`.
    ///
    /// # Errors
    /// A factor of 0, fewer than three dims, a height or width that is no multiple of the factor, an unknown uid.
    pub fn pixel_unshuffle(&mut self, name: &str, x: Uid, factor: u64) -> Result<Uid, Error> {
        let (lead, [channels, height, width]) = self.last_dims(name, x)?;
        if factor == 0 || !height.is_multiple_of(factor) || !width.is_multiple_of(factor) {
            return attribute(name, "factor", factor, "height and width are multiples of the factor, which is at least 1");
        }
        let rank = lead.len() as u32;
        let (height, width) = (height / factor, width / factor);
        let split = [&lead[..], &[channels, height, factor, width, factor]].concat();
        let whole = [&lead[..], &[grown(name, grown(name, channels, factor)?, factor)?, height, width]].concat();
        self.permuted(name, x, &split, rank, [0, 2, 4, 1, 3], &whole)
    }

    /// The channels of `[n, c, …]` dealt out among groups: the first of each group, then the second of each, and so on.
    ///
    /// # Errors
    /// Channels that are no multiple of the groups, fewer than two dims, an unknown uid.
    pub fn channel_shuffle(&mut self, name: &str, x: Uid, groups: u64) -> Result<Uid, Error> {
        let dims = self.dims_named(name, x)?;
        let channels = dims.get(1).copied().filter(|channels| groups > 0 && channels.is_multiple_of(groups));
        let Some(channels) = channels else {
            return attribute(name, "groups", groups, "there are channels, in a second dim, and their number is a multiple of the groups");
        };
        let split = [&[dims[0], groups, channels / groups], &dims[2..]].concat();
        let mut order: Vec<u32> = (0..split.len() as u32).collect();
        order.swap(1, 2);
        let split = self.reshape(name, x, &split)?;
        let dealt = self.transpose(name, split, &order)?;
        self.reshape(name, dealt, &dims)
    }

    fn dims_named(&self, name: &str, x: Uid) -> Result<Vec<u64>, Error> {
        self.dims(x).ok_or_else(|| Error::UnknownTensor { op: name.to_owned(), uid: x })
    }

    /// The dims before the last three, and these.
    fn last_dims(&self, name: &str, x: Uid) -> Result<(Vec<u64>, [u64; 3]), Error> {
        let dims = self.dims_named(name, x)?;
        match dims.split_last_chunk::<3>() {
            Some((lead, last)) => Ok((lead.to_vec(), *last)),
            None => attribute(name, "x", format!("{dims:?}"), "pixels are shuffled among channels, height and width"),
        }
    }

    /// `x` under other dims, of which the last five change their order, under others again.
    fn permuted(&mut self, name: &str, x: Uid, split: &[u64], lead: u32, order: [u32; 5], whole: &[u64]) -> Result<Uid, Error> {
        let order: Vec<u32> = (0..lead).chain(order.map(|dim| lead + dim)).collect();
        let split = self.reshape(name, x, split)?;
        let turned = self.transpose(name, split, &order)?;
        self.reshape(name, turned, whole)
    }
}

/// An extent times a factor.
fn grown(name: &str, extent: u64, factor: u64) -> Result<u64, Error> {
    extent.checked_mul(factor).map_or_else(|| attribute(name, "factor", factor, "the dims of the result are within 64 bits"), Ok)
}
