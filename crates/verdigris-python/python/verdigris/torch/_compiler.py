"""A backend of `torch.compile`: PyTorch's own compiler, Inductor, with convolutions and products that carry what stands behind them.

`torch.compile(model, backend="verdigris")` finds `backend` by the package's entry point. The pass is Inductor's hook for graphs of forward and backward together,
`joint_custom_pre_pass`, with an identity by which Inductor's caches know it.
"""

import dataclasses
import functools
import threading

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from .. import _native
from .._errors import UnsupportedError
from . import _fusion, _ops, _products, _steps

#: Inductor's hook for graphs of forward and backward together.
_HOOK = "joint_custom_pre_pass"

#: The lowerings of operators that are this module's.
_lowerings = {}

#: Modules whose text decides what graphs become; with the library's own identity they are the pass's.
_SOURCES = (_fusion, _products, _steps)


@dataclasses.dataclass
class CompiledGraph:
    """What became of one graph: what steps were looked for behind, in order; how many calls the graph had before steps were made parts of others, and after; and with
    `products` how many calls of ATen's were taken over, and which stay."""

    fusions: list
    calls: tuple = (0, 0)
    taken: int = 0
    stays: list = dataclasses.field(default_factory=list)

    @property
    def fused(self):
        """Those behind which steps were found."""
        return [one for one in self.fusions if one.steps]

    def __str__(self):
        steps = sum(len(one.steps) for one in self.fused)
        before, after = self.calls
        lines = [f"{len(self.fused)} of {len(self.fusions)} calls carry {steps} steps: {before} calls of all kinds before, {after} after"]
        lines += [f"{self.taken} convolutions and products of ATen's taken over, {len(self.stays)} stay"] if self.taken or self.stays else []
        return "\n".join(lines + [f"  {one}" for one in [*self.fusions, *self.stays]])


class _Pass(CustomGraphPass):
    """The pass as Inductor takes it."""

    def __init__(self, compiler, before):
        self._compiler, self._before = compiler, before

    def __call__(self, graph):
        if self._before is not None:
            self._before(graph)
        self._compiler._rewrite(graph)

    def uuid(self):
        own = (_native.BUILD_HASH, self._compiler.products, repr(_native.numbered_policy(_native.current_policy())), *_texts())
        if self._before is None:
            return own
        before = self._before.uuid() if isinstance(self._before, CustomGraphPass) else None
        # Without a word of what came before, nothing is cached.
        return None if before is None else (*own, before)


def _texts():
    import hashlib
    from pathlib import Path

    return tuple(hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest() for module in _SOURCES)


def _keep_calls(graph):
    """Tells Inductor that the package's operators stay calls, as it would find out by itself: but at the first call of each it makes a text of all that the operands are computed
    from, whether anybody listens or not, and that doubles with each residual. Of a ResNet-50 it did not end in three minutes (PyTorch 2.11)."""
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for op in {node.target for node in graph.nodes if node.op == "call_function"}:
        if not (isinstance(op, torch._ops.OpOverload) and op.namespace == "verdigris"):
            continue
        if op not in lowerings:
            make_fallback(op, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True)), warn=False)
        # Inductor has one of its own where it met the operator without this backend.
        if lowerings[op] is not _lowerings.get(op):
            lowerings[op] = _lowerings[op] = _past_dispatcher(op, lowerings[op])


def _past_dispatcher(op, lower):
    """The lowering of an operator, with the name of its kernel in the generated code in place of the operator's: on its way to a kernel in Python PyTorch's dispatcher packs and
    unpacks the operands, which takes longer than the call itself, and steps of small kernels wait for their host."""
    name = op._schema.name.split("::")[1]
    if not hasattr(_ops.kernels, name):
        return lower

    @functools.wraps(lower)
    def lowered(*args, **kwargs):
        from torch._inductor.ir import FallbackKernel
        from torch._inductor.virtualized import V

        graph = V.graph
        before = len(graph.operations)
        result = lower(*args, **kwargs)
        # Code in C++ and exported code find operators by their own names.
        if not (graph.cpp_wrapper or graph.aot_mode or graph.fx_wrapper):
            for made in graph.operations[before:]:
                if isinstance(made, FallbackKernel) and made.op_overload is op:
                    made.python_kernel_name = f"torch.ops.verdigris.kernels.{name}"
        return result

    return lowered


def _calls(graph):
    return sum(node.op == "call_function" for node in graph.nodes)


def _expand(graph, held, table):
    """Decomposes what was held back and is no step of a call, as it would have been from the start by the whole table."""
    from torch.fx.experimental.proxy_tensor import make_fx

    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in held or not node.users:
            continue
        values = torch.fx.node.map_arg((node.args, node.kwargs), _fusion._value)
        tensors = [given for given in node.all_input_nodes]
        function = held[node.target]
        with _fusion._value(tensors[0]).fake_mode:
            places = {id(_fusion._value(given)): place for place, given in enumerate(tensors)}

            def call(*given):
                args, kwargs = torch.utils._pytree.tree_map(lambda value: given[places[id(value)]] if id(value) in places else value, values)
                return function(*args, **kwargs)

            traced = make_fx(call, decomposition_table=table)(*[_fusion._value(given) for given in tensors])
        copies = dict(zip((one for one in traced.graph.nodes if one.op == "placeholder"), tensors))
        with graph.inserting_before(node):
            for one in traced.graph.nodes:
                if one.op == "output":
                    node.replace_all_uses_with(copies[one.args[0]])
                elif one.op != "placeholder":
                    copy = graph.node_copy(one, lambda inner: copies[inner])
                    copy.meta = {**node.meta, "val": one.meta.get("val")}
                    copies[one] = copy
        graph.erase_node(node)


class Compiler:
    """A backend of `torch.compile`: Inductor, with steps behind this package's convolutions and products as parts of their calls.

        compiler = vt.Compiler()
        compiled = torch.compile(vt.convert(model)[0], backend=compiler)
        compiled(batch)
        print(compiler.report)

    `torch.compile(model, backend="verdigris")` uses one of the process's, `vt.compiler()`. Modes and options of `torch.compile` are Inductor's and go to it.

    With `products`, convolutions and products of PyTorch's own (`aten.convolution`, `addmm`, `mm` and the gradients of convolutions) are made this package's
    too, so that networks that no `convert` has gone over are served: precision is then the policy's, `fp32` unless it says otherwise. The policy is the thread's when the graph runs.

    Without `codegen` nothing is generated: graphs run op by op after the pass, for machines without a C++ compiler, and to see what the pass alone does.

    Chains are computed in f32 and rounded once, as what Inductor fuses itself. `report` has what became of each graph that was compiled so far, in order; graphs that
    PyTorch's caches gave back are not among them, since no pass sees them (`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1` turns them off).
    """

    def __init__(self, *, products=False, codegen=True):
        self.products, self.codegen = bool(products), bool(codegen)
        #: What became of graphs, in the order in which they were compiled.
        self.graphs = []
        self._table = {}
        self._lock = threading.Lock()

    @property
    def report(self):
        """All graphs so far, as text."""
        return "\n".join(map(str, self.graphs)) or "no graph was compiled"

    def clear(self):
        """Forgets the graphs so far."""
        self.graphs.clear()

    def __call__(self, module, examples, *, mode=None, options=None):
        from torch._inductor.decomposition import select_decomp_table

        self._table = select_decomp_table()
        table = {op: function for op, function in self._table.items() if op not in _steps.HELD}
        if not self.codegen:
            return self._without_codegen(module, examples, table)
        from torch._inductor import config, list_mode_options
        from torch._inductor.compile_fx import compile_fx

        if not hasattr(config, _HOOK):
            raise UnsupportedError(f"Inductor of PyTorch {torch.__version__} has no `{_HOOK}`, by which this package's pass comes to its graphs; 2.11 has it")
        patches = list_mode_options(mode) if mode and mode != "default" else {}
        patches |= {name.replace("-", "_"): value for name, value in (options or {}).items()}
        # A pass that the caller has there runs first.
        patches[_HOOK] = _Pass(self, patches.get(_HOOK, getattr(config, _HOOK)))
        return compile_fx(module, examples, config_patches=patches, decompositions=table)

    def _rewrite(self, graph):
        taken, stays = _products.take(graph) if self.products else (0, [])
        before = _calls(graph)
        told = _fusion.fuse(graph)
        calls = (before, _calls(graph))
        _expand(graph, {op: self._table[op] for op in _steps.HELD if op in self._table}, self._table)
        graph.lint()
        _keep_calls(graph)
        with self._lock:
            self.graphs.append(CompiledGraph(told, calls, taken, stays))

    def _without_codegen(self, module, examples, table):
        # Inductor's decompositions name this module of its own, and import it nowhere.
        import torch._inductor.lowering  # noqa: F401
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def partition(joint, inputs, **options):
            self._rewrite(joint.graph)
            joint.recompile()
            return min_cut_rematerialization_partition(joint, inputs, **options)

        def inference(graph, inputs):
            self._rewrite(graph.graph)
            graph.recompile()
            return make_boxed_func(graph.forward)

        def run(graph, inputs):
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=run, bw_compiler=run, inference_compiler=inference, partition_fn=partition, decompositions=table)(module, examples)


_DEFAULT = Compiler()


def compiler():
    """The backend that `torch.compile(..., backend="verdigris")` uses: its `report` tells what was fused."""
    return _DEFAULT


def backend(module, examples, **options):
    """What PyTorch finds under the name `verdigris`."""
    return _DEFAULT(module, examples, **options)
