//! Days by number and by name, so that the sample of a day can be drawn again.

use std::time::{SystemTime, UNIX_EPOCH};

const SECONDS: u64 = 86_400;
/// Days of the years of a cycle of the calendar.
const CYCLE: u64 = 146_097;
/// From 0000-03-01, at which the first cycle begins, to 1970-01-01.
const BEFORE: u64 = 719_468;

/// Days since 1970-01-01, in UTC.
pub(crate) fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / SECONDS)
}

/// The number of a day `YYYY-MM-DD`.
///
/// # Errors
/// What is no day, or one before 1970.
pub(crate) fn number_of(name: &str) -> Result<u64, String> {
    let wrong = || format!("`{name}` is no day from 1970-01-01 to 9999-12-31, written YYYY-MM-DD");
    let parts: Vec<u64> = name.split('-').map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
    let [year @ 1970..=9999, month @ 1..=12, day @ 1..=31] = parts[..] else { return Err(wrong()) };
    // Years begin with March, so that the leap day is their last.
    let years = year - u64::from(month <= 2);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let number = (years / 400 * CYCLE + years % 400 * 365 + years % 400 / 4 - years % 400 / 100 + of_year).checked_sub(BEFORE);
    // A 30th of February would be a day of March.
    number.filter(|&number| name_of(number) == name).ok_or_else(wrong)
}

/// The day of that number.
pub(crate) fn name_of(number: u64) -> String {
    let days = number.saturating_add(BEFORE);
    let (cycles, of_cycle) = (days / CYCLE, days % CYCLE);
    let years = (of_cycle - of_cycle / 1_460 + of_cycle / 36_524 - of_cycle / (CYCLE - 1)) / 365;
    let of_year = of_cycle - (365 * years + years / 4 - years / 100);
    let month = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * month + 2) / 5 + 1, (month + 2) % 12 + 1);
    format!("{:04}-{month:02}-{day:02}", cycles * 400 + years + u64::from(month <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_names_and_numbers() {
        for (number, name) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_782, "2026-11-25"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!((name_of(number).as_str(), number_of(name)), (name, Ok(number)));
        }
        assert!((0..60_000).all(|number| number_of(&name_of(number)) == Ok(number)));
    }

    #[test]
    fn what_is_no_day_is_told() {
        for name in
            ["", "today", "2026-11", "2026-11-31", "2026-02-29", "2026-13-01", "1969-12-31", "2026-1-1", "2026-11-25-1", "10000-01-01"]
        {
            assert!(number_of(name).is_err_and(|said| said.contains(name) && said.contains("YYYY-MM-DD")), "{name}");
        }
    }
}
