"""Keep the traced graphs of a loss function on disk, as JSON that is read without running code.

The files lie in the directory of Inductor's cache. A file's name is a hash of what tracing depends
on: Dynamo's graph, the layouts of its inputs, settings of torch, versions and Halley's own code.
"""

import hashlib
import json
import operator
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from typing import Any, final

import torch
import torch._functorch.config
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halley.core.validation import read_text


Graphs = tuple[fx.Graph, fx.Graph]  # forward and backward

_MAX_BYTES = 256 * 2**20  # largest file that is read; 24 layers have about 700,000 bytes
# The implementation of other operators may change without a change of any version in the hash.
_OPERATORS = {"aten", "prims", "_c10d_functional", "_c10d_functional_autograd", "halley"}
_FUNCTIONS = {"getitem": operator.getitem, "sym_sum": torch.sym_sum} | {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "ge", "gt", "le", "lt", "eq", "ne")
}
_EXPRESSIONS = {
    "+": operator.add, "*": operator.mul, ">=": operator.ge, ">": operator.gt,
    "<=": operator.le, "<": operator.lt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_CONSTANTS: dict[str, type] = {
    "dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format
}  # fmt: skip


@final
class _NotStorable(ValueError):
    """A graph contains something that the file format has no form for."""


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any], **options: object) -> str:
    """Return the hash that names the file of a trace; "" if the trace must not be kept.

    It must not be kept if Inductor's caches are disabled, or if tracing runs Python code that the
    hash does not cover: operators of other libraries, selective checkpointing, tensor subclasses.
    """
    from torch._inductor import config  # imports Inductor, which takes time

    if config.force_disable_caches:
        return ""
    try:
        lines = [
            *(torch.__version__, torch.version.git_version, _hash_own_code()),
            *sorted(options.items()),
            *_describe_settings(torch._functorch.config, config),
            *_describe_inputs(inputs),
            *_describe_module(gm),
        ]
    except _NotStorable:
        return ""
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()


@cache
def _hash_own_code() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _describe_settings(*configs: Any) -> Iterator[object]:
    """Yield settings of torch that decide which operators a trace has."""
    for config in configs:
        settings = config.save_config_portable()
        if any(map(callable, settings.values())):
            raise _NotStorable
        yield sorted(settings.items())
    if getattr(torch._functorch.config, "_sync_decision_cross_ranks", False):
        raise _NotStorable  # tracing is a collective then, and a rank that reads a file would miss
    yield torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    for kind in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    yield torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    backend = torch.backends.cuda  # chooses the operator of attention
    yield backend.flash_sdp_enabled(), backend.mem_efficient_sdp_enabled()
    yield backend.cudnn_sdp_enabled(), backend.math_sdp_enabled()
    yield backend.fp16_bf16_reduction_math_sdp_allowed(), torch._C._get_sdp_priority_order()
    if torch.cuda.is_available():
        yield torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def _describe_inputs(inputs: Sequence[Any]) -> Iterator[object]:
    storages: dict[int, int] = {}
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            yield _check_plain(value)
            continue
        if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
            raise _NotStorable
        storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        yield tuple(value.shape), value.stride(), value.storage_offset(), storage
        yield value.dtype, value.device, value.requires_grad


def _describe_module(gm: fx.GraphModule) -> Iterator[object]:
    for name, module in gm.named_modules():
        if not isinstance(module, fx.GraphModule):
            continue
        if name and any(map(callable, module.meta.values())):
            raise _NotStorable  # such as the function that chooses what a checkpoint saves
        yield name
        for node in module.graph.nodes:
            target: Any = node.target
            if node.op == "call_function":
                target = _name_function(target)
            elif node.op == "call_module" or (
                node.op == "get_attr"
                and not isinstance(getattr(module, target, None), fx.GraphModule)
            ):
                raise _NotStorable  # a module, or a constant whose values are part of the trace
            yield node.op, node.name, target, node.args, node.kwargs, node.meta.get("custom")


def _name_function(target: Any) -> str:
    """Return the name of a function whose code is that of torch or Halley, or of Python itself."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = str(target)
        if name.partition(".")[0] not in _OPERATORS:
            raise _NotStorable
        return name
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__qualname__", "") or getattr(target, "__name__", "")
    known = module.partition(".")[0] in ("torch", "_operator", "operator", "math", "builtins")
    if not known or "<locals>" in name:  # functions made by one function have one name
        raise _NotStorable
    return f"{module}.{name}"


def graph_path(key: str) -> Path:
    """Return the file of a hash, in the directory of Inductor's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "halley" / f"{key}.json"


def write_graphs(path: Path, graphs: Graphs) -> None:
    """Write graphs to a file, unless the format has no form for a value; warn if that fails."""
    metadata: dict[str, int] = {}
    try:
        halves = [_encode_graph(graph, metadata) for graph in graphs]
    except _NotStorable:
        return
    text = json.dumps([[json.loads(each) for each in metadata], *halves])
    # Other ranks may write the same file: each writes its own, and the last one stays.
    own = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(f"{_checksum(text)}\n{text}")
        own.replace(path)
    except OSError as error:
        warnings.warn(f"the traced graphs of lanes cannot be kept: {error}", stacklevel=2)
        with suppress(OSError):
            own.unlink()


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _encode_graph(graph: fx.Graph, metadata: dict[str, int]) -> list[object]:
    """Return nodes as lists; add their distinct metadata to ``metadata``, which numbers them."""
    at = {node: index for index, node in enumerate(graph.nodes)}

    def encode(value: Any) -> object:
        if isinstance(value, fx.Node):
            return {"node": at[value]}
        if isinstance(value, list | tuple):
            return {_list_or_tuple(value): [encode(each) for each in value]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        for name, kind in _CONSTANTS.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        return _check_plain(value)

    lines: list[object] = []
    for node in graph.nodes:
        target: Any = node.target
        if node.op == "call_function":
            names = [name for name, each in _FUNCTIONS.items() if each is target]
            if not names and not isinstance(target, torch._ops.OpOverload):
                raise _NotStorable
            target = names[0] if names else _name_function(target)
        elif node.op == "placeholder":
            target = node.name  # what a graph calls this input otherwise has no effect
        elif node.op != "output":
            raise _NotStorable
        kwargs = {name: encode(value) for name, value in node.kwargs.items()}
        text = json.dumps(_encode_value(node.meta.get("val")))
        number = metadata.setdefault(text, len(metadata))
        lines.append([node.op, node.name, target, [*map(encode, node.args)], kwargs, number])
    return lines


def _list_or_tuple(value: Sequence[Any]) -> str:
    return "tuple" if isinstance(value, tuple) else "list"


def _check_plain(value: Any) -> Any:
    if type(value) not in (bool, int, float, str, type(None)):
        raise _NotStorable(f"invalid value: {value!r}")
    return value


def _encode_value(value: Any) -> object:
    """Encode the metadata of a node: tensors without data, numbers, sizes, and lists of these."""
    if isinstance(value, list | tuple):
        return {_list_or_tuple(value): [_encode_value(each) for each in value]}
    if isinstance(value, torch.SymInt | torch.SymBool):
        return _encode_expression(getattr(value.node, "expr", None))
    if not isinstance(value, torch.Tensor):
        return _check_plain(value)
    if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
        raise _NotStorable
    size, stride = (
        [_encode_value(each) for each in part] for part in (value.shape, value.stride())
    )
    return {"tensor": [size, stride, str(value.dtype).removeprefix("torch."), str(value.device)]}


def _encode_expression(expression: Any) -> object:
    if getattr(expression, "is_Integer", False):
        return int(expression)
    name = getattr(expression, "name", "")
    if name[:1] == "u" and name[1:].isdecimal():
        return {"symbol": int(name[1:])}
    kinds = {"Add": "+", "Mul": "*"}
    kind = getattr(expression, "rel_op", kinds.get(type(expression).__name__))
    if kind not in _EXPRESSIONS:
        raise _NotStorable
    return {kind: [_encode_expression(each) for each in expression.args]}


def read_graphs(path: Path) -> Graphs | None:
    """Return the graphs of a file, or None without one; warn of a damaged file and return None."""
    if not path.exists():
        return None
    try:
        content = read_text(path, what="traced graphs", max_bytes=_MAX_BYTES)
        checksum, _, text = content.partition("\n")
        if checksum != _checksum(text):
            raise ValueError("its checksum is wrong")
        metadata, *halves = json.loads(text)  # graphs have infinities, which ``parse_json`` refuses
        forward, backward = (_decode_graph(lines, _Metadata(metadata)) for lines in halves)
    except Exception as error:  # the file may contain anything
        warnings.warn(f"the traced graphs in {path} cannot be used: {error!r}", stacklevel=2)
        return None
    return forward, backward


@final
class _Metadata:
    """Makes the metadata of nodes: tensors without data, whose sizes may have symbols."""

    def __init__(self, encoded: list[Any]) -> None:
        self._encoded = encoded
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment)
        self._symbols: list[Any] = []
        self._made: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._made:
            self._made[index] = self._decode(self._encoded[index])
        return self._made[index]

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return _check_plain(value)
        ((kind, content),) = value.items()
        if kind == "symbol":
            return self._symbol(content)
        if kind == "tensor":
            size, stride = ([self._decode(each) for each in part] for part in content[:2])
            dtype, device = _constant("dtype", content[2]), torch.device(content[3])
            with self._mode:
                return torch.empty_strided(size, stride, dtype=dtype, device=device)
        parts = [self._decode(each) for each in content]
        if kind in ("list", "tuple"):
            return parts if kind == "list" else tuple(parts)
        return reduce(_EXPRESSIONS[kind], parts)

    def _symbol(self, index: int) -> Any:
        while len(self._symbols) <= index:  # the environment numbers symbols in this order
            self._symbols.append(symbol := self._environment.create_unbacked_symint())
            torch._check(symbol >= 0)
        return self._symbols[index]


def _decode_graph(lines: list[Any], metadata: _Metadata) -> fx.Graph:
    graph, nodes = fx.Graph(), list[fx.Node]()

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return _check_plain(value)
        ((kind, content),) = value.items()
        if kind == "node":
            return nodes[content]
        if kind == "device":
            return torch.device(content)
        if kind in _CONSTANTS:
            return _constant(kind, content)
        parts = [decode(each) for each in content]
        return parts if kind == "list" else tuple(parts)

    for op, name, target, args, kwargs, number in lines:
        if op == "call_function":
            target = _find_function(target)
        elif op not in ("placeholder", "output") or target != name:
            raise ValueError(f"invalid operation: {op} {target}")
        # fx generates Python code from names, so they must be no other code.
        for each in (name, *kwargs):
            if not each.isidentifier():
                raise ValueError(f"invalid name: {each}")
        arguments = {key: decode(each) for key, each in kwargs.items()}
        node = graph.create_node(op, target, tuple(map(decode, args)), arguments, name)
        if node.name != name:
            raise ValueError(f"name used twice: {name}")
        if op != "output":
            node.meta["val"] = metadata[number]
        nodes.append(node)
    return graph


def _find_function(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    library, operator_name, overload = name.split(".")
    if library in _OPERATORS and operator_name != "from_file":
        found = getattr(getattr(getattr(torch.ops, library), operator_name), overload)
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise ValueError(f"invalid operator: {name}")


def _constant(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _CONSTANTS[kind]):
        raise ValueError(f"invalid {kind}: {name}")
    return found
