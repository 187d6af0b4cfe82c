//! From problems to programs: every algorithm and its kernels.
