//! What is right, and how near is near enough.
