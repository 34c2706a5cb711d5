"""Compile the items of a training step; items of equal code and shapes share one compilation."""

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen  # pyright: ignore[reportPrivateUsage]

from halley.compiler.graph_analysis import is_view
from halley.compiler.graph_collectives import ALL_TO_ALL, operator_name
from halley.lanes.capture import KEEP_RANDOM, Inner
from halley.lanes.cut import Item
from halley.ops.own_rows import start_all_to_all


# A function that runs an item's code; it returns the results and may empty its argument list.
Call = Callable[[list[Any]], Sequence[Any]]


@final
@dataclass(eq=False)
class SegmentCompiler:
    """Makes functions from the code of items, one for all items of equal code and shapes."""

    inner: Inner  # "eager" runs the operators one by one; "inductor" compiles segments and units
    calls: dict[str, Call] = field(default_factory=dict)  # the functions by hash of the code

    def compile(self, item: Item) -> tuple[str, Call]:
        """Return the hash of an item's code, and the function, compiled or eager, that runs it."""
        assert item.code is not None
        key = hash_code(item.kind, item.code)
        if key not in self.calls:
            computes = item.kind in ("segment", "unit") and any(
                node.op == "call_function" and not is_view(node) for node in item.code.nodes
            )
            is_compiled = self.inner == "inductor" and computes
            graph = keep_own_rows(item.code) if item.kind == "start" else item.code
            # Make a graph module for new code only: this generates Python code, which takes time.
            code = fx.GraphModule(item.code.owning_module or {}, graph)
            self.calls[key] = (_compile if is_compiled else _run_eagerly)(code)
        return key, self.calls[key]


def hash_code(kind: str, code: fx.Graph) -> str:
    """Return a hash of an item's kind, code, constants and input layouts; equal in all processes.

    Nodes and sizes that depend on data are numbered in order of first use.
    """
    at = {node: index for index, node in enumerate(code.nodes)}
    sizes: dict[str, str] = {}

    def describe(value: object) -> object:
        if isinstance(value, torch.Tensor):
            layout = [describe(size) for size in (*value.shape, *value.stride())]
            return layout, value.dtype, value.device
        if isinstance(value, torch.SymInt):
            return sizes.setdefault(str(value), f"size {len(sizes)}")
        return value

    lines: list[object] = [kind]
    for node in code.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: f"%{at[each]}")
        if "_assert_scalar" in operator_name(node):
            args = args[:1]  # drop the message, which contains names of nodes and sizes
        if node.op == "placeholder":
            args = describe(node.meta["val"])
        elif node.op == "get_attr":
            args = _describe_constant(getattr(code.owning_module, str(node.target)))
        # Use a Python function's name: its ``str`` has an address, which differs between processes.
        name = operator_name(node) and str(node.target)
        lines.append((node.op, name or getattr(node.target, "__name__", ""), args, kwargs))
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()


def _describe_constant(value: object) -> str:
    if isinstance(value, torch.Tensor):
        values = value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(values).hexdigest()}"
    return str(getattr(value, "group_name", value))


def keep_own_rows(code: fx.Graph) -> fx.Graph:
    """Return a copy of a graph whose all-to-alls on GPUs are calls of ``start_all_to_all``."""
    copied = deepcopy(code)
    for node in copied.nodes:
        if operator_name(node) == ALL_TO_ALL and node.meta["val"].is_cuda:
            node.target = start_all_to_all
    return copied


def _run_eagerly(code: fx.GraphModule) -> Call:
    code.graph.set_codegen(_BoxedCodeGen())
    code.recompile()
    return code.forward


def _compile(code: fx.GraphModule) -> Call:
    """Compile an item's code by Inductor, after tracing it again with new symbolic sizes.

    Inductor binds a symbol only to an input size that is this symbol alone. A segment may have an
    input of size ``u0 + u1``, and none of size ``u0``. So each distinct size becomes a new symbol.
    It is unbacked: a backed symbol would bring guards that nobody checks ("at least 2").
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    from halley.compiler.inductor import decompose  # imports Triton

    environment = ShapeEnv()
    symbols: dict[str, Any] = {}

    def make(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape, stride = (
                [make(size) for size in part] for part in (value.shape, value.stride())
            )
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        if not isinstance(value, torch.SymInt):
            return value
        if str(value) not in symbols:
            symbols[str(value)] = size = environment.create_unbacked_symint()
            torch._check(size >= 0)
        return symbols[str(value)]

    inputs = [node.meta["val"] for node in code.graph.find_nodes(op="placeholder")]
    # Code constants are real tensors; FakeTensorMode must allow them beside fake ones.
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        values = [make(value) for value in inputs]
        # These sizes come from inputs: tracing must not look for nodes that compute them.
        environment.ignorable_fresh_unbacked_symbols.clear()
        environment.pending_fresh_unbacked_symbols.clear()
        traced = make_fx(lambda *args: code(*args))(*values)
    if environment.guards:
        raise RuntimeError(f"a segment is valid for some sizes only: {environment.guards}")
    decompose(traced.graph)
    traced.recompile()
    output = traced.graph.output_node()
    # Inductor must keep the strides of all results: later items are compiled for these strides.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore
    with tracing(TracingContext(mode)), config.patch(KEEP_RANDOM):
        return compile_fx_inner(traced, values)  # type: ignore[return-value]
