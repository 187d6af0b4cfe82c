//! The command line: doctor, verify, inspect, bench.

fn main() {}
