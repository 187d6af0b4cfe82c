"""fp32 convolution of the CPU device against PyTorch's, at the same number of threads, interleaved.

    python bench/cpu_conv.py PATH/TO/verdigris >> bench/record/cpu/DATE-conv.jsonl

Needs torch and Python 3.11. One JSON object a line: medians over all rounds of both sides, and their ratio (below 1: PyTorch is faster).
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tomllib

import torch

THREADS = int(os.environ.get("RAYON_NUM_THREADS", "2"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
SAMPLES = 3
LIST = os.path.join(os.path.dirname(__file__), "lists", "cpu_conv.toml")


def torch_direction(layer, direction):
    """A function that runs one direction of a layer once."""
    n, c, k, groups = layer["n"], layer["c"], layer["k"], layer.get("groups", 1)
    stride, pad, dilation = layer.get("stride", 1), layer.get("pad", 0), layer.get("dilation", 1)
    x = torch.randn(n, c, *layer["input"])
    w = torch.randn(k, c // groups, *layer["filter"])
    run = lambda: torch.nn.functional.conv2d(x, w, None, stride, pad, dilation, groups)
    if direction == "fprop":
        return run
    dy = torch.randn_like(run())
    mask = [direction == "dgrad", direction == "wgrad", False]
    arguments = ([stride] * 2, [pad] * 2, [dilation] * 2, False, [0, 0], groups, mask)
    return lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *arguments)


def torch_us(run):
    run()
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


def spread(samples):
    low, _, high = statistics.quantiles(samples, n=4)
    return (high - low) / statistics.median(samples)


def main():
    program = sys.argv[1]
    torch.set_num_threads(THREADS)
    environment = dict(os.environ, RAYON_NUM_THREADS=str(THREADS))
    with open(LIST, "rb") as file:
        layers = tomllib.load(file)["layer"]
    for layer in layers:
        ours, peers, rows = {}, {}, {}
        with torch.no_grad():
            runs = {direction: torch_direction(layer, direction) for direction in ("fprop", "dgrad", "wgrad")}
            for _ in range(ROUNDS):
                command = [program, "demo", "net", "--list", LIST, "--only", layer["name"], "--samples", str(SAMPLES), "--json"]
                output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                for line in output.splitlines():
                    row = json.loads(line)
                    # A name may be part of another one.
                    if row["problem"] == layer["name"]:
                        rows[row["direction"]] = row
                        ours.setdefault(row["direction"], []).append(row["us"])
                for direction, run in runs.items():
                    peers.setdefault(direction, []).extend(torch_us(run))
        for direction, row in rows.items():
            us, peer_us = statistics.median(ours[direction]), statistics.median(peers[direction])
            record = {
                "suite": "cpu-conv",
                "class": "cpu_conv",
                "problem": layer["name"],
                "direction": direction,
                "dtype": "f32",
                "engine": row["engine"],
                "threads": THREADS,
                "us": us,
                "gflops": row["gflops"] * row["us"] / us,
                "workspace_bytes": row["workspace_bytes"],
                "peer": "PyTorch " + torch.__version__,
                "peer_us": peer_us,
                "ratio": peer_us / us,
                "spread": spread(ours[direction]),
                "peer_spread": spread(peers[direction]),
                "samples": ROUNDS * SAMPLES,
                "load_average": os.getloadavg()[0],
                "machine": platform.processor() or platform.machine(),
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            print(json.dumps(record), flush=True)


main()
