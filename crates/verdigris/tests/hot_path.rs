//! What executing a plan costs beside its launches: no memory of the host or the device, no compiler, and no lock that another execution
//! would wait for. On a driver without a device, in a program whose allocator counts.
#![forbid(unsafe_code)]

use verdigris::{Binding, Config, Error, GraphPlan, Handle, Policy, WorkspaceSource};
use verdigris_cuda::fake::{self, Allocations, CountingAllocator};
use verdigris_cuda::{DeviceBuffer, DeviceSlice, Stream};
use verdigris_graph::{BinaryOp, Conv, ConvDirection, Graph, GraphBuilder, HostScalar, Precision, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const NONE: Allocations = Allocations { host: 0, device: 0 };

fn handle() -> Handle {
    Handle::on(&fake::context(), &Config::default()).expect("the fake is always there")
}

/// A product and a convolution that TMA serves, temporaries between them, host scalars, a reduction and a concatenation in parts.
fn graph() -> Result<Graph, verdigris_graph::Error> {
    let rows = |dims: &[u64]| Layout::row_major(dims).expect("small");
    let mut g = GraphBuilder::new("all kinds");
    let x = g.tensor("x", DType::Bf16, Layout::with_order(&[2, 64, 16, 16], &[0, 2, 3, 1]).expect("small"));
    let w = g.tensor("w", DType::Bf16, Layout::with_order(&[64, 64, 3, 3], &[0, 2, 3, 1]).expect("small"));
    let mut conv = Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Fp32);
    (conv.pads_before, conv.pads_after) = (vec![1, 1], vec![1, 1]);
    let y = g.conv_fprop("convolution", conv)?;
    let y = g.unary("relu", UnaryOp::Relu, y)?;
    let mean = g.reduction("mean", ReductionOp::Avg, y, &[2, 3])?;
    let flat = g.reshape("flat", mean, &[2, 64])?;
    let (a, b) = (g.tensor("a", DType::Bf16, rows(&[256, 128])), g.tensor("b", DType::Bf16, rows(&[128, 64])));
    let product = g.matmul("product", a, b, Precision::Fp32)?;
    let factor = g.host_scalar("factor", DType::F32);
    let product = g.scale("scale", product, HostScalar::Bound(factor))?;
    g.store(product, "d", DType::Bf16)?;
    let head = g.slice("head", product, &[0, 0], &[2, 64], &[1, 1])?;
    let sum = g.binary("sum", BinaryOp::Add, flat, head)?;
    let all = g.concat("all", &[sum; 10], 0)?;
    g.store(all, "result", DType::F32)?;
    g.finish()
}

fn buffers(handle: &Handle, plan: &GraphPlan) -> Vec<(Uid, Option<DeviceBuffer>)> {
    let make = |bytes| handle.pool().alloc(handle.stream(), bytes).expect("allocates");
    plan.tensors().iter().map(|tensor| (tensor.uid, (!tensor.is_scalar).then(|| make(tensor.bytes)))).collect()
}

fn bindings(buffers: &[(Uid, Option<DeviceBuffer>)]) -> Vec<(Uid, Binding<'_>)> {
    buffers
        .iter()
        .map(|(uid, buffer)| (*uid, buffer.as_ref().map_or(Binding::Scalar(0.5), |buffer| Binding::Buffer(buffer.slice()))))
        .collect()
}

#[test]
fn executing_takes_no_memory_and_compiles_nothing() {
    let handle = handle();
    let plan = handle.plan_graph(&graph().expect("fits"), &Policy::default()).expect("plans");
    let text = plan.explain().to_string();
    assert!(plan.parts().count() >= 4 && text.contains("gemm.wgmma") && text.contains("conv.implicit_gemm"), "{text}");
    let buffers = buffers(&handle, &plan);
    let bound = bindings(&buffers);
    let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
    assert_ne!(fake::allocations(), NONE, "allocations are counted");
    drop(Vec::<u8>::with_capacity(100));
    assert_eq!(fake::allocations(), Allocations { host: 1, device: 0 });

    let loaded = handle.loader().cache.loaded_count();
    fake::launch_count();
    fake::allocations();
    for _ in 0..5 {
        plan.execute(handle.stream(), &bound, workspace.slice()).expect("executes");
        assert_eq!(fake::allocations(), NONE);
    }
    let launches: usize = plan.parts().map(|part| part.program().launch_count()).sum();
    assert_eq!(fake::launch_count(), 5 * launches);
    // On a stream that the plan has not met before, the first execution may have marks made for those behind it.
    let other = Stream::new(handle.context()).expect("a stream");
    plan.execute(&other, &bound, workspace.slice()).expect("executes");
    fake::allocations();
    for _ in 0..5 {
        plan.execute(&other, &bound, workspace.slice()).expect("executes");
        assert_eq!(fake::allocations(), NONE);
    }
    assert_eq!(handle.loader().cache.loaded_count(), loaded);
    // From the pool it is one request to the device's allocator, and none to the host's.
    plan.execute_from(handle.stream(), &bound, &workspace).expect("executes");
    assert_eq!(fake::allocations(), NONE);
    plan.execute_from(handle.stream(), &bound, handle.pool()).expect("executes");
    let taken = fake::allocations();
    assert!(taken.device == u64::from(plan.workspace_bytes() > 0), "{taken:?}");
}

/// Lends a buffer, after executing the plan in the midst of the execution that asks.
struct Nested<'p> {
    plan: &'p GraphPlan,
    bound: &'p [(Uid, Binding<'p>)],
    outer: &'p DeviceBuffer,
    inner: &'p DeviceBuffer,
}

impl WorkspaceSource for Nested<'_> {
    fn lend(&self, stream: &Stream, _: u64, work: &mut dyn FnMut(DeviceSlice<'_>) -> Result<(), Error>) -> Result<(), Error> {
        self.plan.execute(stream, self.bound, self.inner.slice())?;
        // And from another thread, which would wait for ever for a lock that this execution holds.
        std::thread::scope(|scope| scope.spawn(|| self.plan.execute(stream, self.bound, self.inner.slice())).join().expect("no panic"))?;
        work(self.outer.slice())
    }
}

#[test]
fn an_execution_in_the_midst_of_another_waits_for_nothing() {
    let handle = handle();
    let plan = handle.plan_graph(&graph().expect("fits"), &Policy::default()).expect("plans");
    let buffers = buffers(&handle, &plan);
    let bound = bindings(&buffers);
    let make = || handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
    let (outer, inner) = (make(), make());
    let launches: usize = plan.parts().map(|part| part.program().launch_count()).sum();
    fake::launch_count();
    plan.execute_from(handle.stream(), &bound, &Nested { plan: &plan, bound: &bound, outer: &outer, inner: &inner }).expect("executes");
    assert_eq!(fake::launch_count(), 2 * launches, "two on this thread");
}
