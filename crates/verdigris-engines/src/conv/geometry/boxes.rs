//! Boxes of pixels: what one launch covers of a convolution whose pixels are more than it counts.

use verdigris_kir::face::Val;
use verdigris_kir::params::Divide;

use crate::fuse::epilogue::Pixel;
use crate::layout::space::divisor;

/// A box of images, depths, heights and widths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) struct Boxes {
    /// Its first pixel.
    pub(in crate::conv) first: [u64; 4],
    /// Its extents.
    pub(in crate::conv) lengths: [u64; 4],
}

impl Boxes {
    /// Cuts pixels into boxes of at most `most` (at least 1) pixels: whole rows, planes and images as far as that allows. An extent of 0
    /// makes none.
    pub(in crate::conv) fn all(extents: [u64; 4], most: u64) -> Vec<Boxes> {
        let mut lengths = [1; 4];
        let mut room = most.max(1);
        for (length, extent) in lengths.iter_mut().zip(extents).rev() {
            *length = extent.min(room).max(1);
            room /= *length;
        }
        let mut boxes = vec![Boxes { first: [0; 4], lengths: [0; 4] }];
        for dim in 0..4 {
            boxes = boxes
                .into_iter()
                .flat_map(|one| {
                    (0..extents[dim].div_ceil(lengths[dim])).map(move |i| {
                        let mut next = one;
                        next.first[dim] = i * lengths[dim];
                        next.lengths[dim] = lengths[dim].min(extents[dim] - next.first[dim]);
                        next
                    })
                })
                .collect();
        }
        boxes
    }

    /// Its pixels.
    pub(in crate::conv) fn count(&self) -> u64 {
        self.lengths.iter().product()
    }

    pub(in crate::conv) fn arguments(&self) -> PixelBoxArguments {
        let [_, depths, heights, widths] = self.lengths;
        PixelBoxArguments { first: self.first.map(|first| first as u32), lengths: [depths, heights, widths].map(divisor) }
    }
}

verdigris_kir::parameters! {
    /// The pixels of a launch: a box of images, depths, heights and widths.
    #[derive(Clone, Copy)]
    pub(in crate::conv) struct PixelBox / PixelBoxArguments of () as _spec {
        pub(in crate::conv) first: [u32; 4],
        pub(in crate::conv) lengths: [Divide; 3],
    }
}

impl<'k> PixelBox<'k> {
    /// Image, depth, height and width of a pixel, counted in the box row-major.
    pub(in crate::conv) fn split(&self, pixel: Val<'k, u32>) -> Pixel<'k> {
        let [depths, heights, widths] = self.lengths;
        let (rest, w) = widths.split(pixel);
        let (rest, h) = heights.split(rest);
        let (n, d) = depths.split(rest);
        let [first_n, first_d, first_h, first_w] = self.first;
        [n + first_n, d + first_d, h + first_h, w + first_w]
    }
}

#[cfg(test)]
mod tests {
    use verdigris_kir::face::{Header, build};
    use verdigris_kir::interp::{self, Kernels, Memory, Options};
    use verdigris_kir::params::Write;
    use verdigris_kir::program::{Address, KernelRef, Launch, Program};

    use super::*;

    verdigris_kir::parameters! {
        struct Told / ToldArguments of () as _spec {
            to: Write = 16,
            count: u32,
            pixels: PixelBoxArguments,
        }
    }

    #[test]
    fn boxes_cover_pixels_once() {
        assert_eq!(Boxes::all([3, 1, 5, 7], 1 << 20), [Boxes { first: [0; 4], lengths: [3, 1, 5, 7] }]);
        assert_eq!(Boxes::all([0, 1, 5, 7], 100), []);
        let boxes = Boxes::all([3, 4, 5, 7], 50);
        assert_eq!(boxes.iter().map(Boxes::count).sum::<u64>(), 3 * 4 * 5 * 7);
        assert!(boxes.iter().all(|one| one.count() <= 50) && boxes.len() == 12, "planes of 35 pixels");
        let rows = Boxes::all([1, 1, 3, 100], 33);
        assert_eq!(rows.len(), 3 * 4);
    }

    /// Each pixel of a box as a kernel counts them, the boxes behind the first among them, against loops over the box.
    #[test]
    fn boxes_begin_where_they_say() {
        const THREADS: u32 = 64;
        let kernel = KernelRef::new("told", || {
            build(Header { name: "told".to_owned(), threads: THREADS, ..Header::default() }, |k| {
                let Told { to, count, pixels } = Told::declare(k, &());
                k.when(k.thread().lt(count), || {
                    let place = pixels.split(k.thread());
                    (0..).zip(place).for_each(|(dim, index)| k.st_global(to.at(k.thread(), 16), 4 * dim, index));
                });
            })
        });
        let boxes = Boxes::all([3, 4, 5, 7], 50);
        assert!(boxes.iter().skip(1).all(|one| one.first != [0; 4]));
        for one in boxes {
            let mut right = vec![u32::MAX; 4 * THREADS as usize];
            let [images, depths, heights, widths] = [0, 1, 2, 3].map(|dim| one.first[dim]..one.first[dim] + one.lengths[dim]);
            let places = images.flat_map(|n| {
                let (heights, widths) = (heights.clone(), widths.clone());
                depths.clone().flat_map(move |d| {
                    let widths = widths.clone();
                    heights.clone().flat_map(move |h| widths.clone().map(move |w| [n, d, h, w]))
                })
            });
            for (place, to) in places.zip(right.chunks_exact_mut(4)) {
                to.copy_from_slice(&place.map(|index| index as u32));
            }
            let mut memory = Memory::new();
            memory.add_filled(16 * u64::from(THREADS), 0xff);
            let args = ToldArguments { to: Address::buffer(0), count: one.count() as u32, pixels: one.arguments() };
            let mut program = Program { buffer_alignment_bytes: vec![16], ..Program::default() };
            program.launch(Launch::new(kernel.clone(), [1, 1, 1], args.bound(&())));
            if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &Options::schedule(1)) {
                panic!("{one:?}: {findings}");
            }
            assert_eq!(memory.to_vec(0), right.iter().flat_map(|index| index.to_le_bytes()).collect::<Vec<u8>>(), "{one:?}");
        }
    }
}
