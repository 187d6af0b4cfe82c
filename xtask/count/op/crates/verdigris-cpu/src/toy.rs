//! The cube of each element.

use rayon::prelude::*;
use verdigris_graph::{Node, Toy, Uid};
use verdigris_tensor::DType;

use crate::elements::{ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;

fn cubed<T: Real>(op: &Toy, context: &Context<'_>, y: ViewMut<'_>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let order = row_major(&y.layout);
    y.fill::<T>(context.scratch, order, |y| {
        y.par_iter_mut().zip(x.data()).for_each(|(y, x)| *y = T::from_f64(x.to_f64().powi(3)));
    });
}

impl Operation for Toy {
    const ENGINE: Engine = Engine::Pointwise;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((y, _)) = results(outputs) {
            if context.tensor(self.x).dtype == DType::F64 { cubed::<f64>(self, context, y) } else { cubed::<f32>(self, context, y) }
        }
    }
}

#[cfg(test)]
mod tests {
    use verdigris_graph::GraphBuilder;
    use verdigris_reference::data::{Distribution, graph_inputs};
    use verdigris_reference::graph::{Selection, evaluate};
    use verdigris_tensor::Layout;

    use super::*;
    use crate::{Bindings, GraphPlan};

    #[test]
    fn cubes_are_those_of_the_reference() {
        for dtype in [DType::F32, DType::F64, DType::Bf16] {
            let mut g = GraphBuilder::new("toy");
            let x = g.tensor("x", dtype, Layout::with_order(&[3, 70], &[1, 0]).expect("small"));
            let y = g.toy("toy", x).expect("fits");
            g.store(y, "y", DType::F32).expect("stores");
            let graph = g.finish().expect("valid");
            let inputs = graph_inputs(&graph, Distribution::Normal, 1);
            let wanted = evaluate(&graph, &inputs, Selection::All).expect("evaluates");
            let mut bytes = vec![0xff; 4 * 210];
            let plan = GraphPlan::new(&graph).expect("plans");
            plan.run(Bindings::new().input(x, &inputs.buffers[&x]).output(y, &mut bytes)).expect("runs");
            let report = verdigris_reference::compare::compare(&wanted[0], &vec![0xff; 4 * 210], &bytes);
            assert!(report.passes(), "{dtype}: {report:?}");
        }
    }
}
