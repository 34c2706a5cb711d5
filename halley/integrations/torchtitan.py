"""Run the routed experts of torchtitan by a strategy of Halley; see docs/torchtitan.md.

torchtitan's option ``--override.imports halley.integrations.torchtitan.enable`` calls ``enable``.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from halley.core.types import Routing, local_experts
from halley.integrations.contract import (
    Framework,
    LocalExperts,
    describe,
    shared_runner,
    stack_swiglu,
    to_local,
    warn_deprecated,
)


__all__ = ["FRAMEWORK", "HalleyRoutedExperts", "describe", "enable", "halley"]

FRAMEWORK = Framework(package="torchtitan", install="torchtitan", newest=(0, 3))
_DTYPE = torch.bfloat16  # torchtitan's grouped GEMMs cast all weights to bfloat16; so does Halley

_titan = FRAMEWORK.import_names(
    {
        "override": "torchtitan.config",
        "derive": "torchtitan.config",
        "RoutedExperts": "torchtitan.models.common.moe",
        "GroupedExperts": "torchtitan.models.common.moe",
        "LocalTokenDispatcher": "torchtitan.models.common.token_dispatcher",
        "AllToAllTokenDispatcher": "torchtitan.models.common.token_dispatcher",
        "MinimalAsyncEPTokenDispatcher": "torchtitan.models.common.token_dispatcher",
        "HybridEPTokenDispatcher": "torchtitan.models.common.token_dispatcher",
        "maybe_set_sparse_mesh": "torchtitan.distributed.spmd_types",
        "no_typecheck": "spmd_types",
    }
)
# Dispatchers with which torchtitan captures CUDA graphs, which it does not with all-to-alls.
_CAPTURED = (_titan.MinimalAsyncEPTokenDispatcher.Config, _titan.HybridEPTokenDispatcher.Config)
_ROUTING = ("topk_scores_BLK", "topk_expert_ids_BLK", "num_local_tokens_per_expert_E")
FRAMEWORK.check_parameters(_titan.RoutedExperts.forward, "self", "x_BLD", *_ROUTING)


class MeshHolder(_titan.MinimalAsyncEPTokenDispatcher):
    """Token dispatcher that only keeps the mesh of expert parallelism.

    Its base class is one with which torchtitan captures CUDA graphs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.MinimalAsyncEPTokenDispatcher.Config):
        """The configuration of MinimalAsyncEP, of which nothing is used."""

    def __init__(self, config: Any) -> None:
        super(_titan.MinimalAsyncEPTokenDispatcher, self).__init__(config)  # needs no GPU

    def init_buffer(self) -> None:
        """Allocate no buffers."""


class HalleyRoutedExperts(_titan.RoutedExperts):
    """torchtitan's routed experts with dispatch, experts and combine run by a strategy of Halley.

    Parameters, names and meshes are torchtitan's. The token dispatcher only provides the mesh.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.RoutedExperts.Config):
        """torchtitan's configuration of routed experts, with Halley's options added."""

        strategy: str = "auto"  # a name that halley.build_strategy accepts, such as "fused:inputs"
        strict: bool = False  # raise an error, do not only warn, if Halley cannot run the experts
        max_load: float = 0.0  # as for ``ExpertRunner``, for steps in CUDA graphs

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._runner = shared_runner(config.strategy, config.strict, config.max_load)
        self._prepared: Any = None
        self._unsupported = ""
        if type(self.inner_experts) is not _titan.GroupedExperts:
            name = type(self.inner_experts).__name__
            self._unsupported = f"experts module {name} is no plain GroupedExperts"
            self._runner.check_supported(self._unsupported)

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard as torchtitan does, prepare the runner; ``ValueError`` if experts % ranks > 0."""
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            local_experts(self.inner_experts.num_experts, ep_size=mesh.size())
        super().parallelize(parallel_dims)
        self._prepared = self._runner.prepare(None if mesh is None else mesh.get_group())

    # torchtitan finds the sharding of each argument by its name, so the names must not change.
    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Return each token's weighted sum of expert outputs, ``(B, L, D)``; a collective.

        ``x_BLD`` (L: positions) is a plain tensor. ``num_local_tokens_per_expert_E`` is unused.
        """
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        group = None if mesh is None else mesh.get_group()
        top_k = topk_expert_ids_BLK.shape[-1]
        with _titan.no_typecheck():
            experts = self._local_experts()
            idx_TK = topk_expert_ids_BLK.reshape(-1, top_k)
            weights_TK = topk_scores_BLK.reshape(-1, top_k)
            routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
            x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
            y_TD = self._runner.run(
                x_TD, routing, experts, group=group, module=self, prepared=self._prepared
            )
            return y_TD.view(x_BLD.shape)

    def _local_experts(self) -> LocalExperts:
        inner, stacked, reason = self.inner_experts, None, self._unsupported
        if not reason:
            weights = map(to_local, (inner.w1_EFD, inner.w3_EFD, inner.w2_EDF))
            stacked = stack_swiglu(*weights, dtype=_DTYPE)
        num_local, function = self._num_local_experts(), self._apply_experts
        return LocalExperts(num_local=num_local, function=function, stacked=stacked, reason=reason)

    def _apply_experts(self, rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        with _titan.maybe_set_sparse_mesh():
            counts_L = torch.bincount(ids_R, minlength=self._num_local_experts())
            return self.inner_experts(rows_RD, counts_L)

    def _num_local_experts(self) -> int:
        return to_local(next(self.inner_experts.parameters())).shape[0]


@_titan.override(target=_titan.RoutedExperts.Config, description="routed experts run by Halley")
def enable(cfg: Any, *, strategy: str = "auto", strict: bool = False, max_load: float = 0.0) -> Any:
    """Return Halley's configuration of routed experts, or ``cfg`` if Halley cannot run them.

    It changes nothing by itself: torchtitan calls it for each MoE layer if ``--override.imports``
    names it, and builds the layer from the result. Options follow the name as JSON:
    ``halley.integrations.torchtitan.enable={"strategy": "fused"}``.

    Args:
        cfg: torchtitan's ``RoutedExperts.Config``.
        strategy, strict, max_load: as in ``HalleyRoutedExperts.Config``. With ``max_load``, the
            trainer's CUDA graphs can include the experts, see the document.

    Raises:
        ValueError: ``strategy`` is unknown; ``max_load`` does not fit; or ``strict``, and Halley
            cannot run these experts.
    """
    runner = shared_runner(strategy, strict, max_load)
    if problem := _find_problem(cfg, max_load=max_load):
        runner.warn_or_raise(problem, fallback="torchtitan runs them")
        return cfg
    options: dict[str, Any] = {"strategy": strategy, "strict": strict, "max_load": max_load}
    if max_load:
        trainer: Any = importlib.import_module("torchtitan.trainer")
        trainer.wrap_with_cuda_graph = wrap_with_cuda_graph
    old = cfg.token_dispatcher
    if type(old) in _CAPTURED:
        options["token_dispatcher"] = MeshHolder.Config(
            num_experts=old.num_experts, top_k=old.top_k
        )
    return _titan.derive(cfg, HalleyRoutedExperts.Config, **options)


def wrap_with_cuda_graph(forward_backward: Any) -> Any:
    """Return a ``BoundedStep`` of the step that torchtitan's trainer captures in a CUDA graph.

    It replaces torchtitan's function of this name in the module of the trainer.
    ``forward_backward`` is a method of the trainer. With CUDA graphs, torchtitan sets gradients to
    zero and adds to them. Halley's graph writes them, so the trainer drops them instead.
    """
    # Imported here: Triton is missing on some platforms.
    from halley.fused.bounded import BoundedStep, CapturedStep

    graphs: Any = importlib.import_module("torchtitan.distributed.cudagraph")
    trainer = forward_backward.__self__
    captured = forward_backward
    if torch.cuda.is_available():  # else torchtitan captures nothing
        capture, model = graphs.wrap_with_cuda_graph, trainer.model_parts[0]
        captured = CapturedStep(forward_backward, model=model, capture=capture)
        zero_grad = trainer.optimizers.zero_grad
        trainer.optimizers.zero_grad = lambda set_to_none=True: zero_grad(set_to_none=True)
    return BoundedStep(
        captured,
        forward_backward,
        model=trainer.model_parts[0],
        num_microbatches=trainer.gradient_accumulation_steps,
    )


@_titan.override(target=_titan.RoutedExperts.Config, description="routed experts run by Halley")
def halley(cfg: Any, *, strategy: str = "auto", strict: bool = False) -> Any:
    """Deprecated name of ``enable``."""
    module = "halley.integrations.torchtitan"
    warn_deprecated(f"{module}.halley", f"{module}.enable")
    return enable(cfg, strategy=strategy, strict=strict)


def _find_problem(cfg: Any, *, max_load: float) -> str:
    if type(cfg) is not _titan.RoutedExperts.Config:
        return f"routed experts ({type(cfg).__qualname__}) must be torchtitan's own RoutedExperts"
    # Non-standard dispatchers may drop tokens, which changes values, or pad experts' rows.
    supported = [_titan.LocalTokenDispatcher.Config, _titan.AllToAllTokenDispatcher.Config]
    if max_load:  # Halley replaces the dispatcher, and drops no token
        supported += _CAPTURED
    dispatcher = type(cfg.token_dispatcher)
    if dispatcher not in supported:
        rule = 'that of moe_comm_backend="standard"'
        return f"token dispatcher ({dispatcher.__qualname__}) must be {rule}"
    return ""
