//! What takes too long to be run every day has its turn: of a list a share each day, all of it within some days.

use std::time::{SystemTime, UNIX_EPOCH};

/// Whether the entry of this number has its turn: one of every `days`, on the day of `VERDIGRIS_DAY`, counted from 1970, or today.
pub(crate) fn has_its_turn(number: u64, days: u64) -> bool {
    let named = std::env::var("VERDIGRIS_DAY").ok().map(|day| day.parse().expect("VERDIGRIS_DAY is a number of days"));
    let day: u64 = named.unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400));
    (number + day).is_multiple_of(days)
}
