//! The language: typed values with operators, verbs for effects.
