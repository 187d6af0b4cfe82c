//! The kernel language: build, verify, print as PTX, interpret.
