"""Our side of a row: the one place of the bench that knows how the package is called.

A row goes through ``verdigris.torch`` where that has a function for it, as a user's would, and through a plan of its graph (``Device.plan``) where
it has none: eight-bit convolutions, for one. The record's field ``door`` says which.

The process remembers nothing of earlier ones: `open_door` turns the file of measured choices off, and the column *instant* takes neither
what was measured in this process nor what ships.
"""

import json
import os
import time
from pathlib import Path
from typing import Callable, Dict, Optional

import torch

from . import source
from .graphs import Graphs
from .peers import Refused
from .problems import Conv, Problem
from .tensors import TYPES, place

#: Names of element types in graphs.
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e4m3fn: "e4m3", torch.int8: "i8", torch.int32: "i32"}

#: How long the kernels of a choice by estimate may take to compile: until they are, a plan takes a way that needs no compiler.
READY_S = 60.0

#: How long the kernels of one call may take to compile, in seconds.
SETTLE_S = 0.2

#: What f32 products may lose, by dtype class.
PRECISION = {"tf32": "tf32"}


class Functions:
    """Functions of PyTorch's tensors, and behind them those that the package has as graphs."""

    def __init__(self, *places):
        self._places = places

    def __getattr__(self, name: str):
        for place in self._places:
            if hasattr(place, name):
                return getattr(place, name)
        raise AttributeError(f"the package has no attribute '{name}'")


class Absent:
    """No package in this process: every row is refused with the reason, and peers are measured alone."""

    def __init__(self, reason: str):
        self.reason = reason

    def versions(self) -> dict:
        return {"verdigris": "absent"}

    def source(self) -> dict:
        return source.describe(None, None)

    def launch(self, problem: Problem, mode: str) -> Callable:
        raise Refused(self.reason)

    def explain(self, problem: Problem, mode: str) -> dict:
        return {}

    def convert(self, network: torch.nn.Module) -> torch.nn.Module:
        raise Refused(self.reason)

    def conv2d(self) -> Callable:
        raise Refused(self.reason)

    def functions(self):
        return self

    def settle(self) -> None:
        pass

    def __getattr__(self, name: str):
        raise Refused(self.reason)

    def package(self) -> Path:
        raise Refused(self.reason)


class Door:
    """The package on one device."""

    def __init__(self, device: torch.device, tuning_ms: float, mode: str = "measured"):
        import verdigris
        import verdigris.torch

        self.device, self.tuning_ms, self.mode = device, tuning_ms, mode
        self.verdigris = verdigris
        self.handle = verdigris.Device(str(device))
        self._graphs = Graphs(verdigris, self.handle)
        # Plans of the row at hand, by mode.
        self._problem: Optional[Problem] = None
        self._plans: Dict[str, object] = {}

    def versions(self) -> dict:
        return {"verdigris": self.verdigris.__version__}

    def source(self) -> dict:
        """Of which sources the package is (``source.describe``)."""
        return source.describe(self.verdigris._native.BUILD_HASH, self.package())

    def package(self) -> Path:
        return Path(self.verdigris.__file__).parent

    def convert(self, network: torch.nn.Module) -> torch.nn.Module:
        """The network with our layers, planned in the door's mode: by the clock, as a user asks for who trains for days, or at once."""
        self.verdigris.torch.set_policy(**({"mode": "measured", "budget_ms": self.tuning_ms} if self.mode == "measured" else {}))
        return self.verdigris.torch.convert(network, inplace=True)[0]

    def attention_of_transformers(self) -> str:
        """The name by which transformers knows our attention."""
        return self.verdigris.torch.register_transformers()

    def compiler(self):
        """Our backend of ``torch.compile``, which tells what it fused."""
        return self.verdigris.torch.Compiler()

    def listen(self, **options):
        """Starts exporters; what comes back pauses, goes on and ends them. Before plans are made, and once a process."""
        return self.verdigris.telemetry(**options)

    def conv2d(self) -> Callable:
        """Our function, planned by estimate."""
        self.verdigris.torch.set_policy()
        return lambda x, w: self.verdigris.torch.conv2d(x, w, None, 1, 1)

    def functions(self):
        """Our functions by PyTorch's names, planned by estimate from nothing that is remembered or ships."""
        self.verdigris.torch.set_policy(remember=False)
        return Functions(self.verdigris.torch, self._graphs)

    def settle(self) -> None:
        """Waits for kernels that are compiled in the background, and has every call planned again: with them, as a process that runs on would."""
        time.sleep(SETTLE_S)
        self.verdigris.torch.clear_plans()
        self._graphs.clear()

    def policy(self, problem: Problem, mode: str):
        """A column's policy (``columns``): measured choices are remembered in the process, instant ones take nothing that is.

        A plan that ships is the one that a user gets who asks for no mode. It has to be planned before the measured one, which would come first.
        """
        precision = PRECISION.get(problem.dtype, "fp32")
        settings = dict(precision=precision, reduced_accumulation=problem.dtype == "fp8", remember=mode != "instant")
        if mode == "measured":
            settings.update(mode="measured", budget_ms=self.tuning_ms)
        return self.verdigris.Policy(**settings)

    def launch(self, problem: Problem, mode: str) -> Callable:
        """A call of the row's operator under a policy, or an execution of its plan."""
        if mode == "shipped" and "shipped" not in self._chosen_by(problem, mode):
            raise Refused("nothing that ships is for this row")
        if mode == "instant":
            self._until_ready(problem)
        operator = self._operator(problem)
        if operator is None:
            return self._planned(problem, mode)
        policy, under = self.policy(problem, mode), self.verdigris.torch.policy

        def launch(first, second):
            with under(policy):
                return operator(first, second)

        return launch

    def _operator(self, problem: Problem) -> Optional[Callable]:
        """The registered operator of a row; None where there is none."""
        if problem.dtype in ("fp8", "int8"):
            return None
        operators = torch.ops.verdigris
        if not isinstance(problem, Conv):
            if problem.batch != 1 or problem.lda or problem.ldb or problem.ldd:
                return None
            return {
                "nt": lambda a, b: operators.linear(a, b.t(), None, ""),
                # The gradients of a linear layer; of the third tensor each needs the dims alone.
                "nn": lambda a, b: operators.gradient(a, None, b, None, None, None, "of=linear wrt=0|", [a.shape[0], b.shape[1]]),
                "tn": lambda a, b: operators.gradient(a.t(), b, None, None, None, None, "of=linear wrt=1|", [a.shape[0], b.shape[1]]),
            }.get(problem.letters)
        words = {"stride": problem.stride, "padding": problem.pad, "dilation": problem.dilation}
        attributes = " ".join(f"{name}={','.join(map(str, values))}" for name, values in words.items()) + f" groups={problem.groups}"
        if problem.direction == "fprop":
            return lambda x, w: operators.conv_fprop(x, w, None, attributes)
        dims = list(problem.result_shape[2:])
        if problem.direction == "dgrad":
            return lambda dy, w: operators.conv_dgrad(dy, w, None, attributes, dims)
        filter_dims = list(problem.result_shape)
        return lambda dy, x: operators.gradient(dy, x, None, None, None, None, f"of=conv_fprop wrt=1|{attributes}", filter_dims)

    def graph(self, problem: Problem):
        """The row as a graph whose operands are called ``a`` and ``b`` and whose result ``d``."""
        graph = self.verdigris.Graph(problem.name)
        operand, result = (NAMES[dtype] for dtype in TYPES[problem.dtype])
        (a_dims, a_strides), (b_dims, b_strides), (d_dims, d_strides) = (place(problem, which) for which in range(3))
        a = graph.tensor("a", operand, list(a_dims), list(a_strides))
        b = graph.tensor("b", operand, list(b_dims), list(b_strides))
        precision = {"tf32": "tf32", "fp8": "fp8_fast"}.get(problem.dtype)
        if isinstance(problem, Conv):
            settings = dict(
                stride=list(problem.stride),
                padding=list(problem.pad),
                dilation=list(problem.dilation),
                groups=problem.groups,
                precision=precision,
            )
            if problem.direction == "fprop":
                made = graph.conv_fprop(a, b, **settings)
            elif problem.direction == "dgrad":
                made = graph.conv_dgrad(a, b, list(d_dims), **settings)
            else:
                made = graph.conv_wgrad(b, a, list(d_dims), **settings)
        else:
            made = graph.matmul(a, b, precision=precision)
        graph.store(made, "d", result, list(d_strides))
        return graph

    def plan(self, problem: Problem, mode: str):
        """The plan of the row's graph. What the clock chose for the operator is remembered, and is not measured again."""
        if self._problem != problem:
            self._problem, self._plans = problem, {}
        if mode not in self._plans:
            try:
                self._plans[mode] = self.handle.plan(self.graph(problem), self.policy(problem, mode))
            except self.verdigris.Error as error:
                raise Refused(str(error)) from error
        return self._plans[mode]

    def _chosen_by(self, problem: Problem, mode: str) -> list:
        why = json.loads(self.plan(problem, mode).explain_json())
        return [part.get("chosen_by") for part in why.get("parts", [])] if isinstance(why, dict) else []

    def _until_ready(self, problem: Problem) -> None:
        """Plans until the least estimate is taken: while its kernels are compiled, a plan takes a way that is compiled already."""
        until = time.monotonic() + READY_S
        while "ready" in self._chosen_by(problem, "instant"):
            if time.monotonic() > until:
                raise Refused(f"the kernels of the choice by estimate were not compiled within {READY_S:.0f} s")
            time.sleep(0.05)
            self._plans.pop("instant")

    def _planned(self, problem: Problem, mode: str) -> Callable:
        plan = self.plan(problem, mode)
        shape, strides = place(problem, 2)
        dtype, device = TYPES[problem.dtype][1], self.device

        def launch(a, b):
            d = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            plan.execute({"a": a, "b": b, "d": d})
            return d

        return launch

    def explain(self, problem: Problem, mode: str) -> dict:
        """Engine and setting of each part, how it was chosen, the workspace, and through which door the row went."""
        plan = self.plan(problem, mode)
        why = json.loads(plan.explain_json())
        facts = {"workspace_bytes": plan.workspace_bytes, "door": "plan" if self._operator(problem) is None else "torch"}
        if isinstance(why, dict):
            parts = why.get("parts", [])
            ways = [part["ways"][part["chosen"]] for part in parts]
            facts["engine"] = " + ".join(str(way.get("engine")) for way in ways)
            facts["knobs"] = [way.get("knobs") for way in ways]
            facts["chosen_by"] = [part.get("chosen_by") for part in parts]
        else:  # the CPU's list of (part, engine)
            facts["engine"] = " + ".join(engine for _, engine in why)
        return facts


def open_door(device: torch.device, tuning_ms: float = 500.0, mode: str = "measured"):
    """Our side on a device; ``tuning_ms`` is the most time that measuring a choice may take for each part of a plan, ``mode`` how networks are planned.

    The environment says whether choices are remembered on disk, and is read when a device is first taken hold of.
    """
    os.environ["VERDIGRIS_PLANS"] = "off"
    try:
        import verdigris
        import verdigris.torch
    except ImportError as error:
        return Absent(f"verdigris.torch cannot be imported: {error}")
    return Door(device, tuning_ms, mode)
