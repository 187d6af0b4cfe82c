//! Gradients of movements.

use super::*;

/// Zeros between elements are put there by way of more dims, of which a tensor has no more than eight.
#[test]
fn slices_with_steps_of_any_rank() {
    for (dims, steps) in
        [(vec![2, 3, 2, 3, 5], vec![1, 2, 1, 2, 3]), (vec![2, 1, 3, 1, 2, 3, 2, 3], vec![1, 1, 2, 1, 1, 2, 1, 2]), (vec![3; 8], vec![2; 8])]
    {
        // Of the last, one element of most dims.
        let stops: Vec<u64> = if dims == [3; 8] { vec![3, 1, 1, 3, 1, 1, 1, 3] } else { dims.clone() };
        hold("steps", |g| {
            let x = input(g, "x", &dims.iter().zip(&stops).map(|(&dim, &stop)| dim.min(stop)).collect::<Vec<_>>());
            Ok((vec![g.slice("slice", x, &vec![0; dims.len()], &stops, &steps)?], vec![x]))
        });
    }
}
