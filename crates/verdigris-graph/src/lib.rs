//! What is asked: operations, inferred shapes, validation, identity.
