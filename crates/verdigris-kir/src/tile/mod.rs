//! Tiles, rings, accumulators, schedules: built from the face alone.
