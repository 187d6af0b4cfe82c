//! Graph files for several batch sizes: one file a size, or one template in which the batch has its place.
//!
//! A graph has fixed extents. Where a batch of another size is another graph in nothing but its extents, one file serves all sizes: it says
//! `"batch"`, or a multiple such as `"196*batch"`, where the number stands that follows from the batch.
//!
//! ```
//! let text = r#"{ "name": "double", "tensors": [
//!     { "uid": 1, "name": "x", "dtype": "f32", "layout": { "dims": ["batch", 4], "strides": [4, 1] } },
//!     { "uid": 2, "name": "y", "dtype": "f32", "layout": { "dims": ["batch", 4], "strides": [4, 1] } }],
//!   "nodes": [{ "name": "double", "op": { "pointwise": { "binary": { "f": "add", "x": 1, "z": 1, "y": 2 } } } }] }"#;
//! let graph = verdigris_serve::template::graph_of_batch("graph.json", text, 3)?;
//! assert_eq!(graph.tensors[0].layout.dims(), [3, 4]);
//! assert!(verdigris_serve::template::graph_of_batch("graph.json", &text.replace("\"batch\"", "\"butch\""), 3).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use serde_json::Value;
use verdigris::Graph;

use crate::error::LoadError;

/// What stands for the batch in the name of a graph file that there is one of for each size.
pub(crate) const IN_FILE_NAME: &str = "{batch}";

/// The graph of a file for a batch of this size. Strings `"batch"` and `"N*batch"` become numbers under `layout` and `op`; a file without
/// them is read as it stands. The graph is validated.
///
/// # Errors
/// [`LoadError::Template`], [`LoadError::Graph`].
pub fn graph_of_batch(file: &str, text: &str, batch: u64) -> Result<Graph, LoadError> {
    let wrong = |message: String| LoadError::Template { file: file.to_owned(), message };
    let mut value: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    for (list, key) in [("tensors", "layout"), ("nodes", "op")] {
        for item in value.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(place) = item.get_mut(key) {
                fill_in(place, batch).map_err(&wrong)?;
            }
        }
    }
    // From text again, so that the rules and messages are those of every graph file.
    verdigris::graph::json::graph_from_json(&value.to_string()).map_err(|source| LoadError::Graph {
        file: file.to_owned(),
        batch,
        source: Box::new(source),
    })
}

fn fill_in(value: &mut Value, batch: u64) -> Result<(), String> {
    match value {
        Value::Array(items) => items.iter_mut().try_for_each(|item| fill_in(item, batch)),
        Value::Object(fields) => fields.values_mut().try_for_each(|field| fill_in(field, batch)),
        Value::String(text) => {
            if let Some(factor) = factor(text) {
                let product = factor?.checked_mul(batch).ok_or_else(|| format!("`{text}` for a batch of {batch} is beyond 64 bits"))?;
                *value = product.into();
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The factor of a placeholder; `None` for other strings, which are names of functions and kinds.
fn factor(text: &str) -> Option<Result<u64, String>> {
    if text == "batch" {
        return Some(Ok(1));
    }
    let (factor, _) = text.split_once('*').filter(|(_, what)| *what == "batch")?;
    Some(factor.parse().map_err(|_| format!("`{text}`: a placeholder is \"batch\" or \"N*batch\" with a whole number N")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{ "name": "batch", "tensors": [
        { "uid": 1, "name": "batch", "dtype": "f32", "layout": { "dims": ["batch", 2], "strides": [1, "batch"] } },
        { "uid": 2, "name": "y", "dtype": "f32", "layout": { "dims": ["2*batch"], "strides": [1] } }],
      "nodes": [{ "name": "batch", "op": { "movement": { "reshape": { "x": 1, "y": 2 } } } }] }"#;

    #[test]
    fn names_stay_and_numbers_follow_the_batch() {
        let text = TEXT.replace(r#"[1, "batch"]"#, "[2, 1]");
        for batch in [1, 3, 64] {
            let graph = graph_of_batch("g.json", &text, batch).unwrap();
            assert_eq!((graph.name.as_str(), graph.tensors[0].name.as_str()), ("batch", "batch"));
            assert_eq!((graph.tensors[0].layout.dims(), graph.tensors[1].layout.dims()), (&[batch, 2][..], &[2 * batch][..]));
        }
    }

    #[test]
    fn what_cannot_be_filled_in_is_told() {
        let told = |text: &str, batch| graph_of_batch("g.json", text, batch).unwrap_err().to_string();
        assert!(told(&TEXT.replace("2*batch", "x*batch"), 2).contains("`x*batch`: a placeholder"));
        assert!(told(TEXT, 1 << 63).contains("beyond 64 bits"));
        assert!(told("{", 1).starts_with("g.json: EOF"));
        // Another string than a placeholder is not taken for one.
        assert!(told(&TEXT.replace("2*batch", "batch*2"), 2).contains("g.json"));
    }
}
