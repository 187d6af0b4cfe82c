"""Graphs, plans and tensors of others on the CPU."""

import json

import numpy as np
import pytest
import torch

import verdigris as vd

CPU = vd.Device("cpu")


def linear_graph(dtype="f32", m=5, k=7, n=3):
    g = vd.Graph("linear")
    x, w = g.tensor("x", dtype, (m, k)), g.tensor("w", dtype, (k, n))
    g.store(g.unary("leaky_relu", g.matmul(x, w), slope=0.25), "y", dtype)
    return g


def truth(x, w):
    product = x.astype("f8") @ w.astype("f8")
    return np.where(product > 0, product, 0.25 * product)


def test_numpy_in_place_of_uids_and_names():
    g = vd.Graph("add")
    x, z = g.tensor("x", "f32", (4,)), g.tensor("z", "f32", (4,))
    s = g.binary("add", x, z)
    g.store(s, "sum", "f32")
    out = np.full(4, -7.0, "f4")
    CPU.plan(g).execute({x: np.arange(4, dtype="f4"), "z": np.ones(4, "f4"), int(s): out})
    assert out.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16"])
def test_numpy_matmul(dtype):
    kind = {"f64": "f8", "f32": "f4", "f16": "f2"}[dtype]
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((5, 7)).astype(kind), rng.standard_normal((7, 3)).astype(kind)
    y = np.full((5, 3), np.nan, kind)
    CPU.plan(linear_graph(dtype)).execute({"x": x, "w": w, "y": y})
    assert np.abs(y - truth(x, w)).max() < {"f64": 1e-14, "f32": 1e-5, "f16": 4e-3}[dtype]


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_tensor_of_one_integer_is_no_address(number):
    # It converts to a number of Python, as an address is one.
    for dims in ((), (1,), (1, 1, 1)):
        g = vd.Graph("one")
        x = g.tensor("x", "u8", dims)
        g.store(g.unary("identity", x), "y", "f32")
        plan, y = CPU.plan(g), torch.full(dims, float("nan"))
        plan.execute({"x": torch.full(dims, number, dtype=torch.uint8), "y": y})
        assert y.item() == number
        # An address is an int.
        given = torch.full(dims, number + 1, dtype=torch.uint8)
        plan.execute({"x": given.data_ptr(), "y": y})
        assert y.item() == number + 1
        if number == 0:
            with pytest.raises(vd.BindingError, match="null"):
                plan.execute({"x": 0, "y": y})


def test_the_precision_of_products_by_policy():
    assert vd.Policy().product_precision("f32") == "fp32" and vd.Policy(precision="ieee").product_precision("f32") == "ieee"
    assert vd.Policy(precision="tf32").product_precision("f32") == "tf32" and vd.Policy(precision="tf32").product_precision("bf16") == "fp32"
    assert vd.Policy().product_precision("f64") == "f64" and vd.Policy().product_precision("i64") is None
    assert vd.Policy().made_unmeasured() is None
    assert vd.Policy(mode="measured", precision="tf32").made_unmeasured() == vd.Policy(precision="tf32")


def test_torch_bf16_and_fp8():
    x, w = torch.randn(5, 7, dtype=torch.bfloat16), torch.randn(7, 3, dtype=torch.bfloat16)
    y = torch.full((5, 3), float("nan"), dtype=torch.bfloat16)
    CPU.plan(linear_graph("bf16")).execute({"x": x, "w": w, "y": y})
    expected = truth(x.double().numpy(), w.double().numpy())
    assert np.abs(y.double().numpy() - expected).max() < 3e-2
    g = vd.Graph("cast")
    g.store(g.unary("identity", g.tensor("x", "e4m3", (3,))), "y", "f32")
    out = torch.zeros(3)
    CPU.plan(g).execute({"x": torch.tensor([1.5, -2.0, 448.0]).to(torch.float8_e4m3fn), "y": out})
    assert out.tolist() == [1.5, -2.0, 448.0]


class OldProducer:
    """A producer of the first DLPack protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        assert stream is None
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OfTwoProtocols(OldProducer):
    """As CuPy's arrays: both protocols, of which one is told our stream."""

    def __init__(self, array):
        super().__init__(array)
        self.asked = []

    def __dlpack__(self, stream=None):
        self.asked.append("dlpack")
        return super().__dlpack__(stream)

    @property
    def __cuda_array_interface__(self):
        self.asked.append("interface")
        return dict(self.array.__array_interface__, stream=7)


class OfAStream:
    """As Numba's arrays: `__cuda_array_interface__` alone, which names a stream."""

    def __init__(self, array, stream):
        self.__cuda_array_interface__ = dict(array.__array_interface__, stream=stream)


class BfloatArray:
    """As ml_dtypes' arrays: NumPy's protocol, a type that NumPy's DLPack has no code for."""

    class dtype:
        name = "bfloat16"

    def __init__(self, bits):
        self.bits = bits
        self.__array_interface__ = bits.__array_interface__


def test_both_protocols_and_the_array_interface():
    x = np.arange(35, dtype="f4").reshape(5, 7) / 8
    w = np.linspace(-1, 1, 21, dtype="f4").reshape(7, 3)
    y = np.empty((5, 3), "f4")
    CPU.plan(linear_graph()).execute({"x": OldProducer(x), "w": w, "y": y})
    assert np.abs(y - truth(x, w)).max() < 1e-5
    g = vd.Graph("cast")
    g.store(g.unary("identity", g.tensor("x", "bf16", (2,))), "y", "f32")
    out = np.empty(2, "f4")
    CPU.plan(g).execute({"x": BfloatArray(np.array([0x3F80, 0xC000], "u2")), "y": out})
    assert out.tolist() == [1.0, -2.0]


def test_the_protocol_that_orders_work_comes_first():
    x, w = OfTwoProtocols(np.ones((5, 7), "f4")), np.ones((7, 3), "f4")
    y = np.empty((5, 3), "f4")
    CPU.plan(linear_graph()).execute({"x": x, "w": w, "y": y})
    assert x.asked == ["dlpack"] and (y == 7).all()
    # No consumer may guess which stream is meant by 0.
    with pytest.raises(vd.BindingError, match="the stream 0; 1 is the legacy default stream"):
        CPU.plan(linear_graph()).execute({"x": OfAStream(np.ones((5, 7), "f4"), 0), "w": w, "y": y})


def test_memory_is_given_back():
    import gc
    import weakref

    class Array(np.ndarray):
        pass

    x = np.ones((5, 7), "f4").view(Array)
    gone = weakref.ref(x)
    CPU.plan(linear_graph()).execute({"x": x, "w": np.ones((7, 3), "f4"), "y": np.empty((5, 3), "f4")})
    del x
    gc.collect()
    assert gone() is None


def test_strides_of_one_do_not_matter_and_others_do():
    plan = CPU.plan(linear_graph(m=1))
    x = torch.randn(1, 7).as_strided((1, 7), (99, 1))
    w, y = torch.randn(7, 3), torch.empty(1, 3)
    plan.execute({"x": x, "w": w, "y": y})
    with pytest.raises(vd.BindingError, match=r"`w` is bound to f32 \[7, 3\]:\[1, 7\], it needs f32 \[7, 3\]:\[3, 1\]"):
        plan.execute({"x": x, "w": torch.randn(3, 7).t(), "y": y})


def test_what_is_bound_is_checked_before_anything_runs():
    plan = CPU.plan(linear_graph())
    x, w, y = np.ones((5, 7), "f4"), np.ones((7, 3), "f4"), np.full((5, 3), 9, "f4")
    frozen = y.copy()
    frozen.setflags(write=False)
    wrong = {
        "`y` is bound to nothing": {"x": x, "w": w},
        "`x` is bound to f64": {"x": x.astype("f8"), "w": w, "y": y},
        "strides are not negative": {"x": x[::-1], "w": w, "y": y},
        "read-only": {"x": x, "w": w, "y": frozen},
        "`y` is bound to bytes that `x` shares": {"x": x, "w": w, "y": x.reshape(-1)[:15].reshape(5, 3)},
        "null pointer": {"x": 0, "w": w, "y": y},
        "has no such tensor": {"x": x, "w": w, "y": y, 99: y},
        "`x` is bound to two": {"x": x, plan.tensors[0]["uid"]: x, "w": w, "y": y},
    }
    for words, tensors in wrong.items():
        with pytest.raises(vd.BindingError, match=words):
            plan.execute(tensors)
    with pytest.raises(KeyError, match="binds no tensor `q`; it binds x, w, y"):
        plan.execute({"q": x})
    with pytest.raises(TypeError, match="is no tensor"):
        plan.execute({"x": "text", "w": w, "y": y})
    assert (y == 9).all()


def test_errors_have_the_library_s_words():
    g = vd.Graph()
    a, b = g.tensor("a", "f32", (2, 3)), g.tensor("b", "f32", (4, 5))
    with pytest.raises(vd.GraphError, match="`b`"):
        g.matmul(a, b)
    with pytest.raises(vd.GraphError, match="`f33` is no element type"):
        g.tensor("c", "f33", (1,))
    with pytest.raises(vd.GraphError, match="nonsense"):
        g.unary("nonsense", a)
    with pytest.raises(vd.ConfigError, match="devices are `cpu`, `cuda` and `cuda:N`"):
        vd.Device("tpu")
    with pytest.raises(vd.ConfigError, match="`ieee`, `fp32` or `tf32`"):
        vd.Policy(precision="fp64")
    assert issubclass(vd.GraphError, vd.Error) and issubclass(vd.GraphError, ValueError)
    if vd.device_count() == 0:
        with pytest.raises(vd.DeviceError, match="driver"):
            vd.Device("cuda:0")


def test_a_second_result_may_be_left_alone():
    g = vd.Graph("loss")
    logits, labels = g.tensor("logits", "f32", (5, 10)), g.tensor("labels", "i32", (5, 1))
    loss, _ = g.cross_entropy(logits, labels, axis=1)
    g.store(loss, "loss", "f32")
    out = np.empty((1, 1), "f4")
    vd.Device("cpu").plan(g).execute({"logits": np.zeros((5, 10), "f4"), "labels": np.zeros((5, 1), "i4"), "loss": out})
    assert abs(out[0, 0] - np.log(10)) < 1e-6


def test_json_and_host_scalars():
    g = vd.Graph("scaled")
    x, factor = g.tensor("x", "f32", (3,)), g.host_scalar("factor")
    g.store(g.scale(x, factor), "y", "f32")
    text = g.to_json()
    assert json.loads(text)["name"] == "scaled"
    again = vd.Graph.from_json(text)
    assert again.to_json() == text
    out = np.empty(3, "f4")
    CPU.plan(again).execute({"x": np.array([1, 2, 3], "f4"), "factor": 2.5, "y": out})
    assert out.tolist() == [2.5, 5.0, 7.5]
    with pytest.raises(vd.GraphError, match="read from JSON is complete"):
        again.tensor("z", "f32", (1,))


def test_integer_host_scalars():
    g = vd.Graph("repeated")
    x, times = g.tensor("x", "f32", (3,)), g.host_scalar("times", "i32")
    g.store(g.scale(x, times), "y", "f32")
    plan = CPU.plan(vd.Graph.from_json(g.to_json()))
    out = np.empty(3, "f4")
    bound = {"x": np.array([1, 2, 3], "f4"), "y": out}
    for value in (-3, np.int64(-3), np.int8(-3)):
        plan.execute({**bound, "times": value})
        assert out.tolist() == [-3.0, -6.0, -9.0]
    for value, words in ((2**31, "the integer 2147483648"), (2**64 - 1, "the integer 18446744073709551615"), (0.5, "a real number")):
        with pytest.raises(vd.BindingError, match=f"`times` is bound to {words}, it needs a host scalar of i32"):
            plan.execute({**bound, "times": value})
    with pytest.raises(vd.BindingError, match="`times` is bound to no number, it needs a host scalar of i32"):
        plan.execute({**bound, "times": [1, 2]})
    with pytest.raises(vd.GraphError, match="a host scalar is f32, f64 or an integer"):
        g = vd.Graph("half")
        g.store(g.scale(g.tensor("x", "f16", (3,)), g.host_scalar("factor", "f16")), "y", "f16")
        CPU.plan(g)


def test_every_family_against_torch():
    g = vd.Graph("many")
    x, w = g.tensor("x", "f32", (2, 4, 9, 8)), g.tensor("w", "f32", (6, 4, 3, 3))
    y = g.conv_fprop(x, w, stride=2, padding=1)
    g.store(y, "conv", "f32")
    g.store(g.pool("max", x, [3, 3], stride=[2, 2], padding=[1, 1]), "max", "f32")
    g.store(g.pool("average", x, adaptive=[2, 2]), "avg", "f32")
    g.store(g.softmax(x, 1, log=True), "log", "f32")
    g.store(g.reduction("avg", x, [2, 3]), "mean", "f32")
    g.store(g.transpose(x, [0, 2, 3, 1]), "turned", "f32")
    g.store(g.conv_dgrad(y, w, [2, 4, 9, 8], stride=2, padding=1), "dx", "f32")
    X, W = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    F = torch.nn.functional
    conv = F.conv2d(X, W, stride=2, padding=1)
    expected = {
        "conv": conv,
        "max": F.max_pool2d(X, 3, 2, 1),
        "avg": F.adaptive_avg_pool2d(X, 2),
        "log": F.log_softmax(X, 1),
        "mean": X.mean((2, 3), keepdim=True),
        "turned": X.permute(0, 2, 3, 1).contiguous(),
        "dx": F.conv_transpose2d(conv, W, stride=2, padding=1, output_padding=(0, 1)),
    }
    out = {name: torch.full_like(value, float("nan")) for name, value in expected.items()}
    plan = CPU.plan(g)
    plan.execute({"x": X, "w": W, **out})
    for name, value in expected.items():
        assert torch.allclose(out[name], value, atol=2e-5), name
    assert any(engine.startswith("cpu.conv") for _, engine in plan.engines) and "cpu.conv" in plan.explain()
    assert all(us >= 0 for *_, us in plan.time({"x": X, "w": W, **out}))


def test_tune_and_policies():
    plan = vd.tune(linear_graph(), CPU, policy={"deterministic": True})
    assert plan.workspace_bytes == 0 and plan.device == CPU
    assert vd.Policy(precision="tf32") == vd.Policy(precision="tf32") != vd.Policy()
    assert hash(vd.Policy(deterministic=True)) == hash(vd.Policy(deterministic=True))


def test_plans_are_shared_by_threads():
    from concurrent.futures import ThreadPoolExecutor

    plan = CPU.plan(linear_graph(m=33, k=65, n=17))
    rng = np.random.default_rng(5)

    def work(seed):
        x, w = (rng.standard_normal(shape).astype("f4") for shape in ((33, 65), (65, 17)))
        y = np.empty((33, 17), "f4")
        plan.execute({"x": x, "w": w, "y": y})
        return np.abs(y - truth(x, w)).max()

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(16))) < 1e-4


def test_gradients_of_a_graph_are_those_of_autograd():
    g = vd.Graph("loss")
    x, w, z = g.tensor("x", "f64", (5, 7)), g.tensor("w", "f64", (7, 3)), g.tensor("z", "f64", (5, 3))
    y = g.unary("tanh", g.matmul(x, w))
    loss = g.reduction("avg", g.binary("mul", y, y), [0, 1])
    dx, dw = g.gradient(loss, [x, w])
    with pytest.raises(vd.GraphError, match="`z`: no gradient; the loss does not depend"):
        g.gradient(loss, [z])
    for uid, name in [(loss, "loss"), (dx, "dx"), (dw, "dw")]:
        g.store(uid, name, "f64")
    rng = np.random.default_rng(4)
    inputs = {"x": rng.standard_normal((5, 7)), "w": rng.standard_normal((7, 3))}
    results = {"loss": np.full((1, 1), np.nan), "dx": np.full((5, 7), np.nan), "dw": np.full((7, 3), np.nan)}
    CPU.plan(g).execute({**inputs, **results})
    tx, tw = (torch.tensor(inputs[name], requires_grad=True) for name in ("x", "w"))
    (tx @ tw).tanh().square().mean().backward()
    assert np.abs(results["dx"] - tx.grad.numpy()).max() < 1e-14
    assert np.abs(results["dw"] - tw.grad.numpy()).max() < 1e-14
