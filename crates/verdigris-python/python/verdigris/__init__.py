"""Verdigris: deep-learning primitives for NVIDIA GPUs, and a CPU device that computes the same.

    import verdigris as vd

    g = vd.Graph("linear")
    x = g.tensor("x", "bf16", (512, 1024))
    w = g.tensor("w", "bf16", (1024, 256))
    g.store(g.matmul(x, w), "y", "bf16")
    plan = vd.Device("cuda:0").plan(g, vd.Policy(mode="measured"))
    print(plan.explain())
    plan.execute({"x": x_tensor, "w": w_tensor, "y": y_tensor})

Tensors are those of PyTorch, CuPy, JAX or NumPy: whatever speaks DLPack or `__cuda_array_interface__`, without copies. `verdigris.torch` has
functions, operators and modules for PyTorch.
"""

import atexit as _atexit
import os as _os
from pathlib import Path as _Path

from . import _native
from ._errors import (
    BindingError,
    ConfigError,
    DeviceError,
    EngineError,
    Error,
    GraphError,
    NoEngineError,
    OutOfMemoryError,
    OutOfRangeError,
    UnsupportedError,
)
from ._native import Device, Graph, Plan, Policy, Telemetry, Uid, __version__, device_count

_native.set_pack_folder(_Path(__file__).parent / "pack")


def tune(graph, device=None, *, candidates=12, budget_ms=500.0, again=False, policy=None, progress=None):
    """Plans `graph` by the clock and returns the plan; the choice is remembered in the plan cache, from which later plans of any mode take it.

    `candidates` ways of each part are run on the device for at most `budget_ms` milliseconds a part (compilation apart), unless an earlier choice
    is remembered and `again` is false. `policy` gives the keywords of `Policy` other than the mode, as a dict. `progress` is called with
    `(part, parts, stage, done, total)`. On the CPU there is one way for each op, and nothing to tune.
    """
    device = Device() if device is None else device
    measured = Policy(**(policy or {}), mode="measured", candidates=candidates, budget_ms=budget_ms, again=again)
    return device.plan(graph, measured, progress)


def telemetry(
    *, prometheus=None, trace=None, events=None, nvml=None, nvtx=None, sample=None, check_numbers=None, check_drift=None, otlp_endpoint=None
):
    """Starts exporters and returns what ends them: `close()`, a `with` block, or the end of the program. A process can do so once.

    `prometheus` is a port or `"address:port"` for `/metrics`; a port alone is the loopback. `trace` is a file that Perfetto opens, `events` a file of
    JSON lines; `%p` in a name is the number of the process. `nvml` reads the GPUs every so many seconds. `nvtx` is the library of a profiler, the
    value of `NVTX_INJECTION64_PATH`. `sample` is (N, a second): every Nth execution of a plan has its time taken, at most so many a second; without it,
    (256, 50). `check_numbers` likewise says whose results are looked through for NaN and infinity, `check_drift` whose results are held against the
    reference; without them nobody's. `otlp_endpoint` is a collector of OpenTelemetry, `"http://host:4318"`, for builds with the feature `otlp`; its headers
    and the name of the service are those of OTEL_EXPORTER_OTLP_HEADERS and OTEL_SERVICE_NAME. Call it before plans are made: they keep the handles of their metrics. `pause()` and `resume()` stop and go on listening.

        verdigris.telemetry(prometheus="127.0.0.1:9464", trace="trace.json")
    """
    running = _native.telemetry(
        prometheus=prometheus,
        trace=trace,
        events=events,
        nvml=nvml,
        nvtx=nvtx,
        sample=sample,
        check_numbers=check_numbers,
        check_drift=check_drift,
        otlp_endpoint=otlp_endpoint,
    )
    _atexit.register(running.close)
    if hasattr(_os, "register_at_fork"):
        _os.register_at_fork(after_in_child=running._forked)
    return running


_atexit.register(_native._write_workloads)


__all__ = [
    "BindingError",
    "ConfigError",
    "Device",
    "DeviceError",
    "EngineError",
    "Error",
    "Graph",
    "GraphError",
    "NoEngineError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "Plan",
    "Policy",
    "Telemetry",
    "Uid",
    "UnsupportedError",
    "__version__",
    "device_count",
    "telemetry",
    "tune",
]
