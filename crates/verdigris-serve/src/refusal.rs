//! Why a request got no result: each kind with its HTTP code, and what is counted of it.
//!
//! ```
//! use verdigris_serve::{Kind, Refusal};
//!
//! let refusal = Refusal::new(Kind::QueueFull, "model `digits`: 256 rows wait and the bound is 256");
//! assert_eq!((refusal.kind.name(), refusal.kind.status(), refusal.kind.outcome()), ("queue_full", 429, "queue_full"));
//! assert!(refusal.kind.may_be_tried_again() && !Kind::BadRequest.may_be_tried_again());
//! assert_eq!(refusal.to_string(), "queue_full: model `digits`: 256 rows wait and the bound is 256");
//! ```

use std::fmt;

/// What kind of refusal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// The request breaks a rule: text that is no JSON, an unknown input, a shape or type that is not the model's. 400.
    BadRequest,
    /// No such path. 404.
    UnknownPath,
    /// No such model. 404.
    UnknownModel,
    /// The path is there, but not for this method. 405.
    Method,
    /// The client went away before its request was whole; 400, which nobody reads.
    Cancelled,
    /// The body did not arrive within its time. 408.
    SlowClient,
    /// A body beyond the limit, or more rows than the largest planned batch. 413.
    TooLarge,
    /// The queue is full, or requests hold all memory that bodies may take. 429.
    QueueFull,
    /// The models are not warm yet. 503.
    NotReady,
    /// The service is ending. 503.
    ShuttingDown,
    /// The device lacked memory for the batch. 503.
    OutOfMemory,
    /// The deadline passed before the result was there. 504.
    Deadline,
    /// The batch could not be computed. 500.
    Failed,
    /// A result is NaN or infinite, which JSON does not hold; binary results do. 500.
    NotInJson,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 14] = [
        Kind::BadRequest,
        Kind::UnknownPath,
        Kind::UnknownModel,
        Kind::Method,
        Kind::Cancelled,
        Kind::SlowClient,
        Kind::TooLarge,
        Kind::QueueFull,
        Kind::NotReady,
        Kind::ShuttingDown,
        Kind::OutOfMemory,
        Kind::Deadline,
        Kind::Failed,
        Kind::NotInJson,
    ];

    /// Its name in an answer.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::BadRequest => "bad_request",
            Kind::UnknownPath => "unknown_path",
            Kind::UnknownModel => "unknown_model",
            Kind::Method => "method",
            Kind::Cancelled => "cancelled",
            Kind::SlowClient => "slow_client",
            Kind::TooLarge => "too_large",
            Kind::QueueFull => "queue_full",
            Kind::NotReady => "not_ready",
            Kind::ShuttingDown => "shutting_down",
            Kind::OutOfMemory => "out_of_memory",
            Kind::Deadline => "deadline",
            Kind::Failed => "failed",
            Kind::NotInJson => "not_in_json",
        }
    }

    /// Its HTTP code.
    pub const fn status(self) -> u16 {
        match self {
            Kind::BadRequest | Kind::Cancelled => 400,
            Kind::UnknownPath | Kind::UnknownModel => 404,
            Kind::Method => 405,
            Kind::SlowClient => 408,
            Kind::TooLarge => 413,
            Kind::QueueFull => 429,
            Kind::NotReady | Kind::ShuttingDown | Kind::OutOfMemory => 503,
            Kind::Deadline => 504,
            Kind::Failed | Kind::NotInJson => 500,
        }
    }

    /// The label `outcome` that it is counted under.
    pub const fn outcome(self) -> &'static str {
        match self {
            Kind::BadRequest | Kind::UnknownPath | Kind::UnknownModel | Kind::Method | Kind::SlowClient => "bad_request",
            Kind::Cancelled => "cancelled",
            Kind::TooLarge => "too_large",
            Kind::QueueFull => "queue_full",
            Kind::ShuttingDown => "shutting_down",
            Kind::Deadline => "deadline",
            Kind::NotReady | Kind::OutOfMemory | Kind::Failed | Kind::NotInJson => "failed",
        }
    }

    /// Whether the same request may be served later; such an answer has the header `retry-after`.
    pub const fn may_be_tried_again(self) -> bool {
        matches!(self, Kind::QueueFull | Kind::NotReady | Kind::ShuttingDown | Kind::OutOfMemory)
    }
}

/// What a message has at the most, but for the sign that it was cut.
pub const LONGEST_MESSAGE_BYTES: usize = 1024;

/// A request that was not served, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// What kind.
    pub kind: Kind,
    /// What is wrong, the values that disagree and the rule.
    pub message: String,
}

impl Refusal {
    /// A refusal of this kind. Of a message that is longer than [`LONGEST_MESSAGE_BYTES`] the beginning is kept: clients' own words stand in them, of any length.
    pub fn new(kind: Kind, message: impl Into<String>) -> Refusal {
        let mut message: String = message.into();
        if message.len() > LONGEST_MESSAGE_BYTES {
            message.truncate(message.floor_char_boundary(LONGEST_MESSAGE_BYTES));
            message.push('…');
            message.shrink_to_fit();
        }
        Refusal { kind, message }
    }

    pub(crate) fn bad(message: impl Into<String>) -> Refusal {
        Refusal::new(Kind::BadRequest, message)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_outcomes_are_those_of_the_table() {
        let names: std::collections::BTreeSet<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
        let table = ["bad_request", "too_large", "queue_full", "deadline", "cancelled", "shutting_down", "failed"];
        assert!(Kind::ALL.iter().all(|kind| table.contains(&kind.outcome()) && (400..600).contains(&kind.status())));
        // A client's own words are cut, between letters.
        let long = Refusal::bad("ä".repeat(LONGEST_MESSAGE_BYTES)).message;
        assert!(long.len() <= LONGEST_MESSAGE_BYTES + '…'.len_utf8() && long.ends_with("ä…"), "{}", long.len());
        assert_eq!(Refusal::bad("x".repeat(LONGEST_MESSAGE_BYTES)).message.len(), LONGEST_MESSAGE_BYTES);
        // What a client may try again is no fault of the request.
        assert!(Kind::ALL.iter().all(|kind| !kind.may_be_tried_again() || matches!(kind.status(), 429 | 503)));
    }
}
