"""A graph whose three ops are one kernel on a GPU, ``y = relu(x @ w + bias)``, on tensors of NumPy. Run: ``python examples/python/fused_graph.py``."""

import numpy as np

import verdigris as vd


def main():
    g = vd.Graph("linear")
    x, w, bias = g.tensor("x", "f32", (33, 65)), g.tensor("w", "f32", (65, 47)), g.tensor("bias", "f32", (1, 47))
    y = g.unary("relu", g.binary("add", g.matmul(x, w), bias))  # results are virtual ...
    g.store(y, "y", "f32")  # ... until they are stored

    plan = vd.Device("cpu").plan(g)  # vd.Device("cuda:0") is a GPU
    print(plan.explain(), plan.engines)

    rng = np.random.default_rng(20)
    values = {name: rng.standard_normal(dims).astype("f4") for name, dims in [("x", (33, 65)), ("w", (65, 47)), ("bias", (1, 47))]}
    result = np.full((33, 47), np.nan, "f4")
    plan.execute({**values, "y": result})

    # The formula, in f64.
    truth = np.maximum(values["x"].astype("f8") @ values["w"].astype("f8") + values["bias"], 0)
    assert np.abs(result - truth).max() < 1e-4, np.abs(result - truth).max()
    return result


if __name__ == "__main__":
    main()
