//! Deep-learning primitives for NVIDIA GPUs: choose, remember, run, explain.
