"""What a run ran on: machine, driver and library versions, clocks, and the run's own ceilings."""

import ctypes
import datetime
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Optional

import torch

from .measure import Side, interleave

#: Products and copies that the ceilings are measured with: (extent of a square product, bytes copied), and what a CPU is asked.
CEILING = {"cuda": (8192, 2 << 30), "cpu": (512, 1 << 26)}

#: Time for each of them.
CEILING_SECONDS = 0.4

_SMI = ("uuid", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def smi(fields=_SMI, device: int = 0) -> dict:
    """What ``nvidia-smi`` says of a device; empty where there is none."""
    try:
        command = ["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (part.strip() for part in answer.splitlines()[0].split(","))))


def clocks(device: torch.device) -> dict:
    """Clocks, power and temperature as they are now."""
    if device.type != "cuda":
        return {}
    return smi(("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"), device.index or 0)


def _boot() -> Optional[str]:
    """What tells one start of a machine from the next: two leases of one chip are two leases."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _cublas() -> Optional[int]:
    version = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}").cublasLtGetVersion()
    except (OSError, AttributeError):
        return None


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        return found.group(1) if found else platform.processor()
    except OSError:
        return platform.processor()


def software(ours: dict) -> dict:
    """Versions of everything that takes part. A gate compares runs of the same driver and peers alone."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, **ours}
    if torch.backends.cudnn.is_available():
        versions["cudnn"] = torch.backends.cudnn.version()
    if torch.cuda.is_available():
        versions["cublaslt"] = _cublas()
    if "triton" in sys.modules:
        versions["triton"] = sys.modules["triton"].__version__
    return {name: version for name, version in versions.items() if version is not None}


def describe(device: torch.device) -> dict:
    """The machine."""
    if device.type != "cuda":
        return {"device": "cpu", "name": _cpu(), "threads": torch.get_num_threads(), "boot": _boot(), "platform": platform.platform()}
    properties = torch.cuda.get_device_properties(device)
    facts = smi(device=device.index or 0)
    return {
        "device": "cuda",
        "name": properties.name,
        "uuid": facts.get("uuid"),
        "driver": facts.get("driver_version"),
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "power_limit": facts.get("power.limit"),
        "clocks.max.sm": facts.get("clocks.max.sm"),
        "boot": _boot(),
        "platform": platform.platform(),
    }


def ceilings(timer, device: torch.device) -> dict:
    """TFLOP/s of a bf16 product (f32 on a CPU), GB/s of a streaming copy, bytes read and bytes written both counted, and the time of a launch
    that does next to nothing, in this run."""
    extent, copied_bytes = CEILING[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(1)
    a = torch.randn(extent, extent, device=device, generator=generator).to(dtype)
    b = torch.randn(extent, extent, device=device, generator=generator).to(dtype)
    d = torch.empty_like(a)
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device).random_(generator=generator)
    target = torch.empty_like(source)
    result = {}
    one = torch.zeros(1, device=device)
    sides = (
        Side("gemm", lambda i: torch.matmul(a, b.t(), out=d)),
        Side("copy", lambda i: target.copy_(source)),
        Side("launch", lambda i: one.zero_()),
    )
    for side in sides:
        samples = interleave(timer, [side], 1, CEILING_SECONDS).samples
        if side.name == "gemm":
            result.update(gemm_tflops=2.0 * extent**3 / samples[0].median * 1e-6, gemm=f"{extent}^3 {str(dtype)[6:]}")
        elif side.name == "launch":
            result.update(launch_us=samples[0].median)
        else:
            result.update(copy_gb_per_s=2.0 * copied_bytes / samples[0].median * 1e-3, copy_bytes=copied_bytes)
    return result


#: Rate of a dtype class in terms of the bf16 product's. f32 has none: policies that emulate it go beyond the rate of FMA.
RATE = {"bf16": 1.0, "f16": 1.0, "tf32": 0.5, "fp8": 2.0, "int8": 2.0}


def least_us(limits: dict, dtype: str, flops: float, traffic_bytes: float) -> Optional[float]:
    """The time that ceilings leave for so much work, a launch included where its floor is known; None where they do not say."""
    if not limits:
        return None
    memory = traffic_bytes / limits["copy_gb_per_s"] * 1e-3
    if dtype not in RATE:
        return None
    return limits.get("launch_us", 0.0) + max(memory, flops / (limits["gemm_tflops"] * RATE[dtype]) * 1e-6)
