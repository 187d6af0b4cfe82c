//! PTX out.
