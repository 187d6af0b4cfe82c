"""Records as the bench writes them, made up, for the tests that judge them."""

from verdigris.bench import record

SIZES = {"n": 8, "c": 64, "k": 64, "input": [56, 56], "filter": [3, 3]}


def row(name, ratio=None, kind="dense", direction="fprop", dtype="bf16", spread=0.004, **more):
    values = {
        "key": f"test/{dtype}/channels-last/{name}-{direction}",
        "class": "test",
        "name": f"{name}-{direction}",
        "bar_kind": kind,
        "direction": direction,
        "dtype": dtype,
        "layout": "channels-last",
        "sizes": SIZES,
        "flops": 1e9,
        "bytes": 10**8,
        "remarks": [],
        "method": 2,
        "sides": {},
    }
    if ratio is not None:
        values.update(
            us=100.0,
            sides={"instant": {"us": 100.0 / 0.9}, "pytorch": {"us": 100.0 * ratio}},
            peer_us=100.0 * ratio,
            ratio=ratio,
            ratio_spread=spread,
            ratio_best=ratio,
            ratio_instant=ratio * 0.9,
            ratio_best_instant=ratio * 0.9,
            peer="pytorch",
            best_peer="pytorch",
            timed_s=0.4,
            blocks=24,
            chosen_by=["clock"],
            tflops=10.0,
            of_ceiling=0.5,
            of_copy=0.6,
            spread=spread,
            engine="conv.test",
        )
    return {**values, **more}


def run(rows, date="2026-01-01T00:00:00Z", chip="GPU-a", driver="580.1", torch="2.11.0", suite="conv"):
    head = {
        "suite": suite,
        "method": 2,
        "date": date,
        "machine": {"name": "NVIDIA H200", "uuid": chip, "boot": "b", "driver": driver, "device": "cuda"},
        "software": {"torch": torch, "cudnn": 91900, "cublaslt": 130100},
        "ceilings": {"gemm_tflops": 700.0, "copy_gb_per_s": 4200.0},
    }
    return record.Run(head, {one["key"]: one for one in rows}, None, None)


def write(path, *runs):
    for one in runs:
        writer = record.Writer(path)
        writer.line("head", one.head)
        for values in one.rows.values():
            writer.line("row", values)
