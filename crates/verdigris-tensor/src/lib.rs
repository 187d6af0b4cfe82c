//! What a tensor is: element formats, exact conversions, layouts.
