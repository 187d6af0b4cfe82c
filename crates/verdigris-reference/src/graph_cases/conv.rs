//! `conv.toml`.

use serde::Deserialize;
use verdigris_graph::{Conv, ConvDirection, ConvMode, Graph, Precision, Uid};
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, Shape, Step, field, normal};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    filter: Option<DType>,
    out: Option<DType>,
    precision: Option<Precision>,
    #[serde(default = "all_directions")]
    directions: Vec<ConvDirection>,
    #[serde(default = "nhwc")]
    layouts: Vec<String>,
    shapes: Vec<String>,
    #[serde(default)]
    mode: ConvMode,
    #[serde(default)]
    before: Vec<Step>,
    #[serde(default)]
    after: Vec<Step>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

fn all_directions() -> Vec<ConvDirection> {
    ConvDirection::ALL.to_vec()
}

fn nhwc() -> Vec<String> {
    vec!["nhwc".to_owned()]
}

impl Cases for Group {
    fn common(&self) -> Common<'_> {
        Common { id: &self.id, data: self.data, deterministic: self.deterministic, device_only: self.device_only }
    }

    fn graphs(&self) -> Result<Vec<(String, Graph)>, CaseError> {
        let mut graphs = Vec::new();
        for text in &self.shapes {
            for shape in Shape::all(&self.id, text)? {
                for &dtype in &self.types {
                    for layouts in &self.layouts {
                        for &direction in &self.directions {
                            let name = format!("{}/{dtype}/{}/{}", direction.name(), layouts.replace('/', "+"), shape.text);
                            graphs.push((name, self.graph(&shape, dtype, layouts, direction)?));
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}

impl Group {
    fn graph(&self, shape: &Shape, dtype: DType, layouts: &str, direction: ConvDirection) -> Result<Graph, CaseError> {
        // One layout for all three, or one each: x/w/y.
        let words: Vec<&str> = layouts.split('/').collect();
        let (x_word, w_word, y_word) = match words[..] {
            [word] => (word, word, word),
            [x, w, y] => (x, w, y),
            _ => return field(&self.id, "layouts", layouts, "one layout, or three with slashes between: of x, w and y"),
        };
        let Some(taps) = shape.pairs('f') else {
            return field(&self.id, "shapes", &shape.text, "a convolution has filter taps, f3x3");
        };
        let spatial = taps.len();
        let pads = shape.each('p', spatial, 0);
        let groups = shape.one('g', 1);
        let filter = self.filter.unwrap_or(dtype);
        let Some(precision) = self.precision.or_else(|| Precision::usual(dtype, filter)) else {
            return field(&self.id, "types", dtype, "a convolution multiplies f64, f32, f16, bf16, fp8 or 8-bit integers");
        };
        let conv = Conv {
            pads_before: pads.iter().map(|pad| pad.0).collect(),
            pads_after: pads.iter().map(|pad| pad.1).collect(),
            strides: shape.numbers('s', spatial, 1),
            dilations: shape.numbers('d', spatial, 1),
            groups,
            mode: self.mode,
            ..Conv::new(direction, Uid(0), Uid(0), Uid(0), spatial, precision)
        };
        let (extents, taps) = (shape.numbers('i', spatial, 1), shape.numbers('f', spatial, 1));
        let (images, channels, filters) = (shape.one('n', 1), shape.one('c', 1), shape.one('k', 1));
        let dims = |first: u64, second: u64, rest: &[u64]| [&[first, second], rest].concat();
        let outs: Option<Vec<u64>> = (0..spatial).map(|i| conv.out_extent(i, *extents.get(i)?, taps[i])).collect();
        let lists = [&conv.pads_before, &conv.strides, &conv.dilations, &extents];
        let Some(outs) = outs.filter(|_| lists.iter().all(|list| list.len() == spatial) && groups > 0) else {
            return field(&self.id, "shapes", &shape.text, "one number or one for each dim of f; the filter fits into the padded input");
        };
        let (x_dims, w_dims, y_dims) =
            (dims(images, channels, &extents), dims(filters, channels / groups, &taps), dims(images, filters, &outs));

        let mut draft = Draft::new(&self.id);
        let (left, right, out, word) = match direction {
            ConvDirection::Fprop => ((x_word, &x_dims), (w_word, &w_dims), &y_dims, y_word),
            ConvDirection::Dgrad => ((y_word, &y_dims), (w_word, &w_dims), &x_dims, x_word),
            ConvDirection::Wgrad => ((x_word, &x_dims), (y_word, &y_dims), &w_dims, w_word),
        };
        let input = draft.tensor("left", dtype, left.0, left.1)?;
        let left = draft.chain(input, left.1, left.0, &self.before)?;
        if left != input {
            let rounded = draft.builder.round_to(left, dtype);
            draft.ok(rounded)?;
        }
        let right = draft.tensor("right", filter, right.0, right.1)?;
        let made = match direction {
            ConvDirection::Fprop => draft.builder.conv_fprop("conv", Conv { x: left, w: right, ..conv }),
            ConvDirection::Dgrad => draft.builder.conv_dgrad("conv", Conv { y: left, w: right, ..conv }, &x_dims),
            ConvDirection::Wgrad => draft.builder.conv_wgrad("conv", Conv { x: left, y: right, ..conv }, &w_dims),
        };
        let made = draft.ok(made)?;
        let result = draft.chain(made, out, word, &self.after)?;
        let usual = match dtype {
            DType::I8 | DType::U8 => DType::I32,
            DType::E4m3 | DType::E5m2 => DType::Bf16,
            other => other,
        };
        draft.store(result, "result", self.out.unwrap_or(usual), word, out)?;
        draft.finish()
    }
}
