from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

__version__: str
SOURCE_HASH: str
BUILD_HASH: str

Progress = Callable[[int, int, str, int, int], object]
Each = int | Sequence[int]

class Uid:
    def __init__(self, number: int) -> None: ...
    @property
    def number(self) -> int: ...
    def __int__(self) -> int: ...

class Policy:
    def __init__(
        self,
        *,
        precision: Literal["ieee", "fp32", "tf32"] = "fp32",
        reduced_accumulation: bool = False,
        deterministic: bool = False,
        workspace_bytes: int | None = None,
        mode: Literal["instant", "measured", "pinned"] = "instant",
        engines: Sequence[str | tuple[int | None, str, Mapping[str, int]]] | None = None,
        candidates: int = 12,
        budget_ms: float = 500.0,
        again: bool = False,
        shipped: bool = False,
        remember: bool = True,
        down_convert: bool = True,
        split_operands: bool = True,
        reduced_sums: bool = True,
        tensor_cores: bool = True,
    ) -> None: ...
    def made_deterministic(self) -> Policy: ...
    def made_unmeasured(self) -> Policy | None: ...
    def product_precision(self, dtype: str) -> str | None: ...

class Device:
    def __init__(self, name: str = "cuda") -> None: ...
    @staticmethod
    def current() -> Device: ...
    @property
    def name(self) -> str: ...
    @property
    def properties(self) -> dict[str, Any]: ...
    def synchronize(self) -> None: ...
    def plan(self, graph: Graph, policy: Policy | None = None, progress: Progress | None = None) -> Plan: ...

class Plan:
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def least_workspace_bytes(self) -> int: ...
    @property
    def engines(self) -> list[tuple[str, str]]: ...
    @property
    def tensors(self) -> list[dict[str, Any]]: ...
    @property
    def device(self) -> Device: ...
    def execute(self, tensors: Mapping[Uid | str | int, Any], *, stream: Any = None, workspace: Any = None) -> None: ...
    def time(self, tensors: Mapping[Uid | str | int, Any], *, stream: Any = None) -> list[tuple[str, str, float]]: ...
    def explain(self) -> str: ...
    def explain_json(self) -> str: ...

class Graph:
    def __init__(self, name: str = "graph") -> None: ...
    @staticmethod
    def from_json(text: str) -> Graph: ...
    def to_json(self) -> str: ...
    def deterministic(self) -> None: ...
    def tensor(
        self, name: str, dtype: str, dims: Sequence[int], strides: Sequence[int] | None = None, alignment_bytes: int | None = None
    ) -> Uid: ...
    def host_scalar(self, name: str, dtype: str = "f32") -> Uid: ...
    # Ops, from the table in crates/verdigris-graph: `cargo run -p verdigris-graph --example ops`.
    def unary(self, f: str, x: Uid, *, name: str = "unary", **attributes: float) -> Uid: ...
    def binary(self, f: str, x: Uid, z: Uid, *, name: str = "binary") -> Uid: ...
    def activation_backward(self, f: str, dy: Uid, x: Uid, *, name: str = "backward", **attributes: float) -> Uid: ...
    def ternary(self, f: str, x: Uid, z: Uid, t: Uid, *, name: str = "ternary") -> Uid: ...
    def gen_index(self, dims: Sequence[int], axis: int, *, name: str = "index") -> Uid: ...
    def random_uniform(self, dims: Sequence[int], state: Uid, *, offset: Uid | None = None, name: str = "random") -> Uid: ...
    def random_normal(self, dims: Sequence[int], state: Uid, *, offset: Uid | None = None, name: str = "normal") -> Uid: ...
    def bernoulli(self, dims: Sequence[int], state: Uid, p: float, *, offset: Uid | None = None, name: str = "bernoulli") -> Uid: ...
    def dropout(self, x: Uid, state: Uid, p: float, *, offset: Uid | None = None, name: str = "dropout") -> Uid: ...
    def scale(self, x: Uid, factor: float | Uid, *, name: str = "scale") -> Uid: ...
    def matmul(
        self,
        a: Uid,
        b: Uid,
        c: Uid | None = None,
        *,
        alpha: float | Uid | None = None,
        beta: float | Uid | None = None,
        precision: str | None = None,
        scale_a: Uid | None = None,
        block_a: tuple[int, int] | None = None,
        scale_b: Uid | None = None,
        block_b: tuple[int, int] | None = None,
        name: str = "matmul",
    ) -> Uid: ...
    def conv_fprop(
        self,
        x: Uid,
        w: Uid,
        *,
        stride: Each = 1,
        padding: Each = 0,
        padding_after: Each | None = None,
        dilation: Each = 1,
        groups: int = 1,
        flip: bool = False,
        precision: str | None = None,
        name: str = "conv",
    ) -> Uid: ...
    def conv_dgrad(
        self,
        dy: Uid,
        w: Uid,
        x_dims: Sequence[int],
        *,
        stride: Each = 1,
        padding: Each = 0,
        padding_after: Each | None = None,
        dilation: Each = 1,
        groups: int = 1,
        flip: bool = False,
        precision: str | None = None,
        name: str = "dgrad",
    ) -> Uid: ...
    def conv_wgrad(
        self,
        x: Uid,
        dy: Uid,
        w_dims: Sequence[int],
        *,
        stride: Each = 1,
        padding: Each = 0,
        padding_after: Each | None = None,
        dilation: Each = 1,
        groups: int = 1,
        flip: bool = False,
        precision: str | None = None,
        name: str = "wgrad",
    ) -> Uid: ...
    def reduction(self, f: str, x: Uid, axes: Sequence[int], *, name: str = "reduce") -> Uid: ...
    def scan(self, f: str, x: Uid, axis: int, *, exclusive: bool = False, reverse: bool = False, name: str = "scan") -> Uid: ...
    def pool(
        self,
        mode: Literal["max", "average"],
        x: Uid,
        window: Sequence[int] | None = None,
        *,
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        padding_after: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        adaptive: Sequence[int] | None = None,
        count_include_pad: bool = True,
        name: str = "pool",
    ) -> Uid: ...
    def max_pool_with_index(
        self,
        x: Uid,
        window: Sequence[int] | None = None,
        *,
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        padding_after: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        adaptive: Sequence[int] | None = None,
        index_dtype: str = "i32",
        name: str = "max_pool",
    ) -> tuple[Uid, Uid]: ...
    def fractional_max_pool(
        self,
        x: Uid,
        samples: Uid,
        window: Sequence[int],
        out: Sequence[int],
        *,
        index_dtype: str = "i32",
        name: str = "fractional_max_pool",
    ) -> tuple[Uid, Uid]: ...
    def pool_backward(
        self,
        mode: Literal["max", "average"],
        dy: Uid,
        x_dims: Sequence[int],
        window: Sequence[int] | None = None,
        *,
        x: Uid | None = None,
        index: Uid | None = None,
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        padding_after: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        adaptive: Sequence[int] | None = None,
        fractional: Sequence[int] | None = None,
        count_include_pad: bool = True,
        name: str = "pool_backward",
    ) -> Uid: ...
    def softmax(self, x: Uid, axis: int, log: bool = False, *, name: str = "softmax") -> Uid: ...
    def softmax_backward(self, y: Uid, dy: Uid, axis: int, log: bool = False, *, name: str = "softmax_backward") -> Uid: ...
    def cross_entropy(
        self,
        logits: Uid,
        labels: Uid,
        axis: int,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        reduction: Literal["none", "sum", "mean"] = "mean",
        name: str = "cross_entropy",
    ) -> tuple[Uid, Uid]: ...
    def cross_entropy_backward(
        self,
        logits: Uid,
        labels: Uid,
        dloss: Uid,
        axis: int,
        *,
        lse: Uid | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        reduction: Literal["none", "sum", "mean"] = "mean",
        name: str = "cross_entropy_backward",
    ) -> Uid: ...
    def normalize(
        self,
        x: Uid,
        axes: Sequence[int],
        eps: float,
        *,
        kind: Literal["layer", "rms"] = "layer",
        groups: int = 1,
        residual: Uid | None = None,
        scale: Uid | None = None,
        bias: Uid | None = None,
        zero_centred: bool = False,
        name: str = "normalize",
    ) -> tuple[Uid, Uid | None, Uid | None, Uid]: ...
    def normalize_backward(
        self,
        x: Uid,
        dy: Uid,
        axes: Sequence[int],
        eps: float,
        *,
        kind: Literal["layer", "rms"] = "layer",
        groups: int = 1,
        scale: Uid | None = None,
        mean: Uid | None = None,
        inv: Uid | None = None,
        dsum: Uid | None = None,
        bias_dims: Sequence[int] | None = None,
        zero_centred: bool = False,
        name: str = "normalize_backward",
    ) -> tuple[Uid, Uid | None, Uid | None]: ...
    def batch_norm(
        self,
        x: Uid,
        scale: Uid | None = None,
        bias: Uid | None = None,
        *,
        add: Uid | None = None,
        running_mean: Uid | None = None,
        running_var: Uid | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
        relu: bool = False,
        activation: str | None = None,
        name: str = "batch_norm",
        **attributes: float,
    ) -> tuple[Uid, Uid, Uid, Uid | None, Uid | None]: ...
    def batch_norm_backward(
        self,
        dy: Uid,
        x: Uid,
        mean: Uid,
        inv: Uid,
        *,
        scale: Uid | None = None,
        bias: Uid | None = None,
        y: Uid | None = None,
        relu: bool = False,
        activation: str | None = None,
        name: str = "batch_norm_backward",
        **attributes: float,
    ) -> tuple[Uid, Uid, Uid, Uid | None]: ...
    def batch_norm_statistics(self, x: Uid, *, name: str = "batch_norm_statistics") -> tuple[Uid, Uid]: ...
    def attention(
        self,
        q: Uid,
        k: Uid,
        v: Uid,
        *,
        scale: float | Uid | None = None,
        causal: Literal["none", "top_left", "bottom_right"] = "none",
        left: int | None = None,
        right: int | None = None,
        soft_cap: float | None = None,
        bias: Uid | None = None,
        mask: Uid | None = None,
        slopes: Uid | None = None,
        sinks: Uid | None = None,
        q_lengths: Uid | None = None,
        kv_lengths: Uid | None = None,
        q_offsets: Uid | None = None,
        kv_offsets: Uid | None = None,
        longest_q: int | None = None,
        longest_kv: int | None = None,
        page_table: Uid | None = None,
        dropout: float | None = None,
        dropout_state: Uid | None = None,
        dropout_offset: Uid | None = None,
        q_descale: Uid | None = None,
        k_descale: Uid | None = None,
        v_descale: Uid | None = None,
        block_map: Uid | None = None,
        mask_blocks: Uid | None = None,
        score: Sequence[tuple[Any, ...]] | None = None,
        score_operands: Sequence[Uid] | None = None,
        max_scores: bool = False,
        name: str = "attention",
    ) -> tuple[Uid, Uid, *tuple[Uid, ...]]: ...
    def attention_backward(
        self,
        q: Uid,
        k: Uid,
        v: Uid,
        o: Uid,
        log_sum_exp: Uid,
        d_o: Uid,
        *,
        scale: float | Uid | None = None,
        causal: Literal["none", "top_left", "bottom_right"] = "none",
        left: int | None = None,
        right: int | None = None,
        soft_cap: float | None = None,
        bias: Uid | None = None,
        mask: Uid | None = None,
        slopes: Uid | None = None,
        sinks: Uid | None = None,
        q_lengths: Uid | None = None,
        kv_lengths: Uid | None = None,
        q_offsets: Uid | None = None,
        kv_offsets: Uid | None = None,
        longest_q: int | None = None,
        longest_kv: int | None = None,
        dropout: float | None = None,
        dropout_state: Uid | None = None,
        dropout_offset: Uid | None = None,
        block_map: Uid | None = None,
        mask_blocks: Uid | None = None,
        score: Sequence[tuple[Any, ...]] | None = None,
        score_operands: Sequence[Uid] | None = None,
        score_gradients: bool = False,
        name: str = "attention_backward",
    ) -> tuple[Uid, Uid, Uid, Uid | None, Uid | None, *tuple[Uid, ...]]: ...
    def reshape(self, x: Uid, dims: Sequence[int], *, name: str = "reshape") -> Uid: ...
    def transpose(self, x: Uid, permutation: Sequence[int], *, name: str = "transpose") -> Uid: ...
    def slice(self, x: Uid, starts: Sequence[int], stops: Sequence[int], steps: Sequence[int], *, name: str = "slice") -> Uid: ...
    def concat(self, xs: Sequence[Uid], axis: int, *, name: str = "concat") -> Uid: ...
    def pad(self, x: Uid, before: Sequence[int], after: Sequence[int], value: float = 0.0, *, name: str = "pad") -> Uid: ...
    def broadcast(self, x: Uid, dims: Sequence[int], *, name: str = "broadcast") -> Uid: ...
    def append(self, x: Uid, rows: Uid, lengths: Uid, axis: int, *, name: str = "append") -> Uid: ...
    def resample(
        self,
        mode: Literal["nearest", "nearest-exact", "linear", "cubic"],
        x: Uid,
        out: Sequence[int],
        *,
        align_corners: bool = False,
        factors: Sequence[float] | None = None,
        name: str = "resample",
    ) -> Uid: ...
    def pad_border(
        self,
        border: Literal["reflect", "replicate", "circular"],
        x: Uid,
        before: Sequence[int],
        after: Sequence[int],
        *,
        name: str = "pad",
    ) -> Uid: ...
    def resample_backward(
        self,
        mode: Literal["nearest", "nearest-exact", "linear", "cubic"],
        dy: Uid,
        x_dims: Sequence[int],
        *,
        align_corners: bool = False,
        factors: Sequence[float] | None = None,
        name: str = "resample_backward",
    ) -> Uid: ...
    def pad_border_backward(
        self,
        border: Literal["reflect", "replicate", "circular"],
        dy: Uid,
        x_dims: Sequence[int],
        before: Sequence[int],
        after: Sequence[int],
        *,
        name: str = "pad_backward",
    ) -> Uid: ...
    # What is no op.
    def gradient(self, loss: Uid, with_respect_to: Sequence[Uid]) -> list[Uid]: ...
    def gradient_from(self, results: Sequence[tuple[Uid, Uid]], with_respect_to: Sequence[Uid]) -> list[Uid]: ...
    def round_to(self, uid: Uid, dtype: str) -> None: ...
    def store(self, uid: Uid, name: str, dtype: str, strides: Sequence[int] | None = None) -> None: ...
    def dims(self, uid: Uid) -> list[int]: ...

class Telemetry:
    @property
    def address(self) -> str | None: ...
    @property
    def absent(self) -> list[str]: ...
    def text(self) -> str: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...
    def _forked(self) -> None: ...
    def __enter__(self) -> Telemetry: ...
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...

def telemetry(
    *,
    prometheus: int | str | None = None,
    trace: str | PathLike[str] | None = None,
    events: str | PathLike[str] | None = None,
    nvml: float | None = None,
    nvtx: str | PathLike[str] | None = None,
    sample: tuple[int, int] | None = None,
    check_numbers: tuple[int, int] | None = None,
    check_drift: tuple[int, int] | None = None,
    otlp_endpoint: str | None = None,
) -> Telemetry: ...
def _write_workloads() -> None: ...
def device_count() -> int: ...
def set_pack_folder(folder: Any) -> None: ...

# What `verdigris.torch` calls; no interface of its own.
def hook_torch(objects: dict[str, Any]) -> None: ...
def functions() -> list[tuple[str, int, list[int], str | None]]: ...
def eager(function: int, /, *arguments: Any) -> Any: ...
def eager_past_autocast(function: int, /, *arguments: Any) -> Any: ...
def differentiated(function: int, /, *arguments: Any) -> tuple[Any, Any, str]: ...
def plain(function: int, policy: int | None, /, *arguments: Any) -> Any: ...
def run(function: int, /, *arguments: Any) -> Any: ...
def run_in_range(function: int, /, *arguments: Any) -> Any: ...
def explain_call(function: int, /, *arguments: Any) -> str: ...
def parts_of_call(
    function: int, tensors: Sequence[tuple[str, Sequence[int], Sequence[int]] | None], attributes: str, dims: Sequence[int]
) -> tuple[list[tuple[str, float]], str]: ...
#: The most plans of calls that are kept.
CALL_PLANS: int

def plan_count() -> int: ...
def clear_plans() -> None: ...
def policy_number(policy: Policy) -> int: ...
def numbered_policy(number: int) -> Policy: ...
def current_policy() -> int: ...
def set_default_policy(number: int) -> None: ...
def exchange_thread_policy(number: int | None) -> int | None: ...
