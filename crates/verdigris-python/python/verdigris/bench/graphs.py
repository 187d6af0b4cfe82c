"""Functions that the package computes as graphs and has no function of PyTorch's tensors for: `ours` shows them beside those that it has.

Each draws its graph once for the shapes, types and strides of its tensors, has it planned by estimate, and executes the plan on PyTorch's current stream.
"""

import torch

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "e4m3",
    torch.int32: "i32",
}

#: The factor of quantization: of rows, in whose reach normal values are.
SCALE = 32.0
EPS = 1e-6


class Graphs:
    """The functions on a device of the library."""

    def __init__(self, verdigris, handle):
        self._verdigris, self._handle, self._plans = verdigris, handle, {}

    def clear(self) -> None:
        """Forgets the plans."""
        self._plans.clear()

    def _run(self, name, tensors, out, draw):
        """Executes `draw(graph, uids) -> uids of the results` on tensors by name, with results like those of `out`."""
        key = (name, *((k, t.dtype, tuple(t.shape), t.stride()) for k, t in (*tensors.items(), *out.items())))
        plan = self._plans.get(key)
        if plan is None:
            graph = self._verdigris.Graph(name)
            made = {k: graph.tensor(k, _NAMES[t.dtype], tuple(t.shape), t.stride()) for k, t in tensors.items()}
            for (k, t), uid in zip(out.items(), draw(graph, made)):
                graph.store(uid, k, _NAMES[t.dtype], t.stride())
            plan = self._plans[key] = self._handle.plan(graph, self._verdigris.Policy(mode="instant", remember=False))
        plan.execute({**tensors, **out})
        results = list(out.values())
        return results[0] if len(results) == 1 else results

    def sum(self, x, dims):
        """The sum over dims, which stay with extent 1."""
        shape = [1 if i in dims else extent for i, extent in enumerate(x.shape)]
        return self._run(f"sum{dims}", {"x": x}, {"y": x.new_empty(shape)}, lambda g, t: [g.reduction("add", t["x"], list(dims))])

    def transposed(self, x):
        """The last two dims of a packed copy turned."""
        order = [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2]
        shape = [x.shape[dim] for dim in order]
        return self._run("transpose", {"x": x}, {"y": x.new_empty(shape)}, lambda g, t: [g.transpose(t["x"], order)])

    def in_format(self, x, is_last):
        """A copy in the other memory format."""
        y = torch.empty_like(x, memory_format=torch.channels_last if is_last else torch.contiguous_format)
        return self._run("format", {"x": x}, {"y": y}, lambda g, t: [g.unary("identity", t["x"])])

    def concat(self, x, other):
        """Both, one behind the other along the second dim."""
        y = x.new_empty((x.shape[0], x.shape[1] + other.shape[1], *x.shape[2:]))
        return self._run("concat", {"x": x, "other": other}, {"y": y}, lambda g, t: [g.concat([t["x"], t["other"]], 1)])

    def swiglu(self, x, gate):
        """``silu(gate) * x``."""
        draw = lambda g, t: [g.binary("mul", t["x"], g.unary("silu", t["gate"]))]
        return self._run("swiglu", {"x": x, "gate": gate}, {"y": torch.empty_like(x)}, draw)

    def quantize(self, x):
        """``SCALE * x`` in e4m3, saturated."""
        draw = lambda g, t: [g.scale(t["x"], SCALE)]
        return self._run("quantize", {"x": x}, {"y": torch.empty_like(x, dtype=torch.float8_e4m3fn)}, draw)

    def add_rms_norm(self, x, residual, weight):
        """``x + residual``, and its RMS norm."""

        def draw(g, t):
            y, total, *_ = g.normalize(t["x"], [x.dim() - 1], EPS, kind="rms", residual=t["residual"], scale=t["weight"])
            return [total, y]

        tensors = {"x": x, "residual": residual, "weight": weight.reshape([1] * (x.dim() - 1) + [-1])}
        return self._run("add_rms_norm", tensors, {"total": torch.empty_like(x), "y": torch.empty_like(x)}, draw)

    def rms_norm_quantize(self, x, weight):
        """The RMS norm as `quantize` has it."""
        draw = lambda g, t: [g.scale(g.normalize(t["x"], [x.dim() - 1], EPS, kind="rms", scale=t["weight"])[0], SCALE)]
        tensors = {"x": x, "weight": weight.reshape([1] * (x.dim() - 1) + [-1])}
        return self._run("rms_norm_quantize", tensors, {"y": torch.empty_like(x, dtype=torch.float8_e4m3fn)}, draw)

    def bias_gelu_dropout_add(self, x, bias, residual, p, state):
        """``residual + dropout(gelu(x + bias))``, the mask drawn from four int32."""

        def draw(g, t):
            active = g.unary("gelu_erf", g.binary("add", t["x"], t["bias"]))
            return [g.binary("add", g.dropout(active, t["state"], p), t["residual"])]

        tensors = {"x": x, "bias": bias, "residual": residual, "state": state}
        return self._run(f"bias_gelu_dropout_add {p}", tensors, {"y": torch.empty_like(x)}, draw)

    def linear_gelu_dropout_add(self, x, weight, bias, residual, p, state):
        """``residual + dropout(gelu(x @ weight + bias))``: one product, whose epilogue draws the mask."""

        def draw(g, t):
            active = g.unary("gelu_erf", g.binary("add", g.matmul(t["x"], t["weight"]), t["bias"]))
            return [g.binary("add", g.dropout(active, t["state"], p), t["residual"])]

        tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "state": state}
        return self._run(f"linear_gelu_dropout_add {p}", tensors, {"y": torch.empty_like(residual)}, draw)
