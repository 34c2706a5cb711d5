"""The code that all plug-ins share: run a framework's routed experts by a strategy of Halley.

A plug-in converts the weights of its framework to ``LocalExperts`` and calls ``ExpertRunner.run``.
``Framework`` finds the installed version and checks that it has the names that the plug-in uses.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from halley.core.routing import route_to_shards
from halley.core.timeline import Recorder
from halley.core.types import Experts, Routing
from halley.distributed.peers import all_gather_objects, name_ranks
from halley.ops.expert_rows import find_alignment_problem
from halley.strategies.all_to_all import run_all_to_all
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy, under_autocast
from halley.strategies.registry import build_strategy, check_strategy


# A framework's own expert code, which is differentiable. It gets rows (R, D), sorted by local
# expert, and each row's local expert id (R,), int64. It returns outputs (R, D), not yet weighted.
ExpertsFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_BOUNDED = ("fused", "unfused")  # kinds of strategies that accept ``max_load``
_DESCRIPTION = "halley_description"  # name of the attribute of a module that ``describe`` reads


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """The experts ``[g * L, (g + 1) * L)`` of rank r, as a plug-in reads them from its framework.

    With tensor parallelism these are shards, and ``g = r // tp_size``; else g is r.
    ``stacked`` has the weights in the layout of strategies, as views where possible, in a dtype of
    ``core.types.DTYPES``. It is None if no strategy can run these experts.
    """

    num_local: int  # L, the number of experts of this rank
    function: ExpertsFunction  # the framework's code, for experts that the strategy cannot run
    stacked: Experts | None = None
    reason: str = ""  # why ``stacked`` is None ("the activation is ReLU"); else ""


def stack_swiglu(*sources: torch.Tensor, dtype: torch.dtype) -> Experts:
    """Return SwiGLU ``Experts``: copies in ``dtype`` of gate, up (L, F, D) and down (L, D, F)."""
    gate, up, down = (weight.to(dtype) for weight in sources)
    return Experts(up_LGD=torch.cat([gate, up], dim=1), down_LDF=down, sources=sources)


@final
class ExpertRunner:
    """Runs experts by one strategy, or by the framework's code if the strategy cannot run them.

    All layers of a model share one runner, and so they share the buffers of its strategy.

    Args:
        strategy: a name that ``halley.strategies.registry.build_strategy`` accepts.
        strict: raise ``ValueError`` where the default warns once and runs the framework's code.
        max_load: with "fused" and "unfused", the size of buffers within a ``BoundedStep``
            (``halley.fused.bounded``), as a multiple of the balanced load; 0 for none.

    Raises:
        ValueError: ``strategy`` is unknown, or ``max_load`` does not fit.
    """

    def __init__(
        self, strategy: str = "auto", *, strict: bool = False, max_load: float = 0.0
    ) -> None:
        check_strategy(strategy)
        if max_load and strategy.partition(":")[0] not in _BOUNDED:
            rule = f"0 with strategy {strategy}, which reads sizes on the host"
            raise ValueError(f"max_load ({max_load}) must be {rule}")
        if max_load and not max_load >= 1:
            raise ValueError(f"max_load ({max_load}) must be 0 or at least 1")
        self.strategy, self.strict, self.max_load = strategy, strict, max_load
        self._strategies: dict[tuple[object, ...], AbstractStrategy] = {}
        self._warned: set[str] = set()
        self._no_module = nn.Identity()  # stands for the module of calls that name none
        self._answers: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str]] = (
            WeakKeyDictionary()
        )

    def run(
        self,
        x_TD: torch.Tensor,
        routing: Routing,
        experts: LocalExperts,
        *,
        group: dist.ProcessGroup | None,
        tp_size: int = 1,
        module: nn.Module | None = None,
        prepared: Any = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's expert outputs, ``(T, D)``.

        Forward and backward are collectives of the group. Differentiable in ``x_TD``, the routing
        weights and the experts' weights.

        Args:
            x_TD: tokens of this rank, of any floating dtype; the sums have the same; T may be 0.
            routing: global expert ids and weights of these tokens.
            group: the expert-parallel group; None for a single rank.
            tp_size: adjacent ranks of the group that share each expert, see ``core.routing``.
            module: gets a description of how its experts ran, see ``describe``.
            prepared: result of ``prepare``. With it, a graph of ``torch.compile`` can include the
                experts. Without it, the graph ends before the experts; a new one starts after them.

        Raises:
            ValueError: shapes or expert ids do not fit; or ``strict``, and the strategy cannot run
                these experts.
        """
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        if experts.stacked is not None:
            experts = replace(experts, stacked=under_autocast(experts.stacked))
        stacked, top_k = experts.stacked, routing.topk_idx_TK.shape[1]
        traced = prepared if torch.compiler.is_compiling() and _allows_unknown_sizes() else None
        if stacked is None or traced is None or find_problem(stacked, traced, top_k=top_k):
            where: dict[str, Any] = {"group": group, "tp_size": tp_size, "module": module}
            return self._run_outside_graph(x_TD, routing, experts, **where)
        if module is not None:
            set_description(module, f"halley: {self.strategy}")
        x_cast_TD = x_TD.to(stacked.up_LGD.dtype)
        return traced.forward_in_graph(x_cast_TD, routing, stacked).to(x_TD.dtype)

    # Most strategies read split sizes on the host, so ``torch.compile`` must not trace this method.
    @torch.compiler.disable(reason="a graph ends at Halley's experts: fullgraph must be False")
    def _run_outside_graph(
        self,
        x_TD: torch.Tensor,
        routing: Routing,
        experts: LocalExperts,
        *,
        group: dist.ProcessGroup | None,
        tp_size: int,
        module: nn.Module | None,
    ) -> torch.Tensor:
        stacked, strategy, top_k = experts.stacked, None, routing.topk_idx_TK.shape[1]
        if stacked is not None:
            strategy = self._find_strategy(group, x_TD.device, tp_size=tp_size)
        problem = self._find_problem(experts, strategy, top_k=top_k, group=group, module=module)
        if problem:
            self.check_supported(problem)
        if stacked is None or strategy is None or problem:
            apply = [partial(_apply_function, experts)]
            recorder = Recorder(x_TD.device, enabled=False)
            where = {"num_local": experts.num_local, "group": group, "recorder": recorder}
            routing = route_to_shards(routing, num_local=experts.num_local, tp_size=tp_size)
            y_TD = run_all_to_all(x_TD, routing, lambda _: apply, **where)
            path = f"sequential, with the framework's own expert code: {problem}"
        else:
            x_cast_TD = x_TD.to(stacked.up_LGD.dtype)
            y_TD = strategy.forward(x_cast_TD, routing, stacked).to(x_TD.dtype)
            reasons = strategy.reasons if isinstance(strategy, AutoStrategy) else []
            path = "; ".join([self.strategy, *reasons])
        if module is not None and not hasattr(module, _DESCRIPTION):
            set_description(module, f"halley: {path}")
        return y_TD

    def check_supported(self, problem: str) -> None:
        """Raise if strict, else warn, about ``problem``; skip this for "auto" and "sequential".

        For these two strategies, running the framework's own expert code is a normal case.
        """
        if self.strategy not in ("auto", "sequential"):
            self.warn_or_raise(
                f"strategy ({self.strategy}) cannot run experts of this kind: {problem}",
                fallback="the framework's own expert code runs between dispatch and combine",
            )

    def warn_or_raise(self, problem: str, *, fallback: str) -> None:
        """Raise ``ValueError`` if strict; else warn on global rank 0, once for each ``problem``.

        ``problem`` and ``fallback`` (which code runs instead) are sentences without a full stop.
        """
        if self.strict:
            raise ValueError(problem)
        if problem not in self._warned:
            self._warned.add(problem)
            if not dist.is_initialized() or dist.get_rank() == 0:
                warnings.warn(f"{problem}; {fallback}", stacklevel=2)

    def prepare(self, group: dist.ProcessGroup | None) -> Any:
        """Return the strategy for a group if ``torch.compile`` can trace it, else None.

        Call it before the first ``run``: ``torch.compile`` cannot trace how a strategy is built.
        """
        if self.strategy.partition(":")[0] not in (*_BOUNDED, "functional"):
            return None
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        on_gpu = "nccl" in dist.get_backend(group) if group else torch.cuda.is_available()
        device = torch.device(f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu")
        with device:  # a framework may have set the default device to "meta"
            return self._find_strategy(group, device)

    def _find_problem(
        self,
        experts: LocalExperts,
        strategy: AbstractStrategy | None,
        *,
        top_k: int,
        group: dist.ProcessGroup | None,
        module: nn.Module | None,
    ) -> str:
        """Return why a rank of the group cannot run its experts by the strategy, or "" if all can.

        The first call of a module, of a dtype, and with or without gradients is a collective. Later
        calls return its answer: all ranks must run the same collectives, and an exchange in each
        step would cost time. "auto" chooses for calls with and without gradients separately.
        """
        stacked = experts.stacked
        sizes = () if stacked is None else (stacked.up_LGD.shape, stacked.up_LGD.dtype)
        # Equal on all ranks, so all ranks exchange in the same call.
        kind = (group, top_k, torch.is_grad_enabled(), *sizes)
        answers = self._answers.setdefault(self._no_module if module is None else module, {})
        if kind not in answers:
            own = experts.reason
            if stacked is not None and strategy is not None:
                own = find_problem(stacked, strategy, top_k=top_k)
            answers[kind] = _first_problem(own, group)
        return answers[kind]

    def _find_strategy(
        self, group: dist.ProcessGroup | None, device: torch.device, *, tp_size: int = 1
    ) -> AbstractStrategy:
        key = group, device, tp_size
        if key not in self._strategies:
            recorder = Recorder(device, enabled=False)
            options: dict[str, Any] = {"recorder": recorder, "tp_size": tp_size}
            if self.max_load:
                # Imported here: Triton is missing on some platforms.
                from halley.fused.bounded import make_workspaces

                limits = {"max_load": self.max_load, "tp_size": tp_size}
                options["workspaces"] = make_workspaces(group, device, **limits)
            self._strategies[key] = build_strategy(self.strategy, group, device=device, **options)
        return self._strategies[key]


@torch.compiler.assume_constant_result
def _allows_unknown_sizes() -> bool:
    """Return whether the graph being traced may have data-dependent sizes; False if not tracing.

    With ``fullgraph``, Dynamo sets ``allow_dynamic_output_shape_ops`` of the ``shape_env``.
    """
    mode = detect_fake_mode()
    return mode is not None and getattr(mode.shape_env, "allow_dynamic_output_shape_ops", False)


def find_problem(experts: Experts, strategy: AbstractStrategy, *, top_k: int) -> str:
    """Return why a strategy cannot run this rank's experts, or "" if it can."""
    return find_alignment_problem(experts) or strategy.find_problem(experts, top_k=top_k)


def _first_problem(own: str, group: dist.ProcessGroup | None) -> str:
    """Return the first problem that a rank of the group reports, or ""; a collective.

    If some ranks have no problem, the text names the ranks that have one.
    """
    if group is None:
        return own
    found = all_gather_objects(own, group=group, operation="the choice of how experts run")
    ranks = dist.get_process_group_ranks(group)
    with_problem = [rank for rank, problem in zip(ranks, found, strict=True) if problem]
    first = next((problem for problem in found if problem), "")
    return first if len(with_problem) in (0, len(found)) else f"{name_ranks(with_problem)}: {first}"


@cache
def shared_runner(strategy: str, strict: bool, max_load: float = 0.0) -> ExpertRunner:
    """Return the one ``ExpertRunner`` that all layers with these options share."""
    return ExpertRunner(strategy, strict=strict, max_load=max_load)


def _apply_function(
    experts: LocalExperts, x_RD: torch.Tensor, ends_L: torch.Tensor
) -> torch.Tensor:
    """Return the outputs ``(R, D)`` of ``experts.function`` for rows sorted by local expert."""
    num_rows = x_RD.shape[0]
    if num_rows == 0:
        # Run expert 0 on a row of zeros and drop its output. Else this rank's backward would not
        # reach the weights, nor the dispatch, whose backward is a collective.
        row_1D = x_RD.sum(0, keepdim=True)
        return experts.function(row_1D, ends_L.new_zeros(1, dtype=torch.int64))[:0]
    counts_L = torch.diff(ends_L, prepend=ends_L.new_zeros(1))
    ids_L = torch.arange(experts.num_local, device=x_RD.device)
    return experts.function(x_RD, ids_L.repeat_interleave(counts_L, output_size=num_rows))


def set_description(module: nn.Module, text: str) -> None:
    """Store in a module a description of how its experts run, which ``describe`` returns."""
    setattr(module, _DESCRIPTION, text)  # not by vars(module), whose writes Dynamo cannot trace


def describe(model: nn.Module) -> dict[str, str]:
    """Return, by module name, the stored descriptions of how modules' experts run.

    Modules that Halley runs appear after their first forward pass, as in "halley: fused". A module
    left to the framework appears with the reason, as in "megatron: fp8 (e4m3) must be None".
    """
    return {
        name: str(vars(module)[_DESCRIPTION])
        for name, module in model.named_modules()
        if _DESCRIPTION in vars(module)
    }


def warn_deprecated(old: str, new: str) -> None:
    """Warn, with a FutureWarning, that the name ``old`` is deprecated and ``new`` replaces it."""
    # This is no DeprecationWarning, because Python hides those outside of the main script.
    warnings.warn(f"{old} is deprecated: use {new}", FutureWarning, stacklevel=3)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework that a plug-in extends, and its newest version that Halley is tested with."""

    package: str  # the name to import
    install: str  # arguments of ``pip install``
    newest: tuple[int, int]

    def find_version(self) -> str:
        """Return the installed version; ``ValueError`` if the framework is not installed."""
        package: Any = find_module(self.package, "__version__")
        if package is None:
            remedy = f"pip install {self.install}"
            raise ValueError(f"package {self.package} must be installed: {remedy}")
        return str(package.__version__)

    def import_names(self, modules: dict[str, str]) -> Any:
        """Return a namespace with imported names; ``modules`` maps each name to its module.

        Warns if the version is too new. Raises ``ImportError`` if the package or a name is missing.
        """
        try:
            version = self.find_version()
        except ValueError as error:
            raise ImportError(str(error)) from error
        self.warn_if_newer(version)
        found = SimpleNamespace()
        for name, module_name in modules.items():
            module = find_module(module_name, name)
            if module is None:
                rule = f"{self._newest}, which Halley is tested with"
                problem = f"this one has no {module_name}.{name}"
                raise ImportError(f"{self.package} ({version}) must be {rule}: {problem}")
            setattr(found, name, getattr(module, name))
        return found

    def warn_if_newer(self, version: str) -> None:
        """Warn if ``version`` has a greater (major, minor) than the newest tested version."""
        major, minor = (int(part) for part in version.split(".")[:2])
        if (major, minor) > self.newest:
            newest = f"{self._newest}, the newest that Halley is tested with"
            warnings.warn(f"{self.package} ({version}) is newer than {newest}", stacklevel=4)

    def check_parameters(self, function: Any, *expected: str) -> None:
        """Raise ``ValueError`` unless a function's parameter names are ``expected``, in order."""
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            rule = f"{self.package} ({self.find_version()}) must be {self._newest} or older"
            names = f"takes {', '.join(found)}, not {', '.join(expected)}"
            raise ValueError(f"{rule}: {function.__qualname__} {names}")

    @property
    def _newest(self) -> str:
        return ".".join(map(str, self.newest))


def find_module(name: str, attribute: str) -> ModuleType | None:
    """Import and return a module; return None if the module or its ``attribute`` is missing."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Raise if module ``name`` exists, but a module that it imports is missing.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        return None
    return module if hasattr(module, attribute) else None


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a ``DTensor`` as a plain tensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
