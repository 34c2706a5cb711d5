"""Routed experts of torchtitan run by Halley, by one flag; see docs/torchtitan.md.

``--override.imports halley.integrations.torchtitan.halley``
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from halley.core.routing import local_experts
from halley.core.types import Experts, Routing
from halley.integrations.contract import ExpertParallelism, LocalExperts, describe, mark
from halley.integrations.versions import check_arguments, import_parts


__all__ = ["NEWEST", "HalleyRoutedExperts", "describe", "halley"]

NEWEST = (0, 3)  # the newest minor version that the tests run with
_DTYPE = torch.bfloat16  # what torchtitan's grouped GEMMs multiply in, whatever the weights are in
_FORWARD = (
    "self",
    "x_BLD",
    "topk_scores_BLK",
    "topk_expert_ids_BLK",
    "num_local_tokens_per_expert_E",
)

_override, _derive, _RoutedExperts, _GroupedExperts, _Local, _AllToAll, _sparse_mesh, _unchecked = (
    import_parts(
        "torchtitan",
        {
            "override": "torchtitan.config",
            "derive": "torchtitan.config",
            "RoutedExperts": "torchtitan.models.common.moe",
            "GroupedExperts": "torchtitan.models.common.moe",
            "LocalTokenDispatcher": "torchtitan.models.common.token_dispatcher",
            "AllToAllTokenDispatcher": "torchtitan.models.common.token_dispatcher",
            "maybe_set_sparse_mesh": "torchtitan.distributed.spmd_types",
            "no_typecheck": "spmd_types",
        },
        install="torchtitan",
        newest=NEWEST,
    )
)
check_arguments(_RoutedExperts.forward, _FORWARD, package="torchtitan", newest=NEWEST)


@cache
def _parallelism(strategy: str, strict: bool) -> ExpertParallelism:
    """Return what all layers share, buffers of the fused kernels among it."""
    return ExpertParallelism(strategy, strict=strict)


class HalleyRoutedExperts(_RoutedExperts):
    """torchtitan's routed experts, dispatched, multiplied and combined by a strategy.

    Parameters, their names and their meshes are those of the class that it stands for. The
    dispatcher is kept for its mesh alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_RoutedExperts.Config):
        """As torchtitan's, and how the experts run.

        Attributes:
            strategy: "auto", "sequential", "chunked", "unfused" or "fused"; the last two also with
                what they keep for backward, as in "fused:inputs".
            strict: True raises where the default warns once.
        """

        strategy: str = "auto"
        strict: bool = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._parallelism = _parallelism(config.strategy, config.strict)
        self._custom = type(self.inner_experts) is not _GroupedExperts
        self._group: Any = None
        self._described = False
        if self._custom:
            self._parallelism.check(_custom_reason(self.inner_experts))

    def parallelize(self, parallel_dims: Any) -> None:
        """Divide the experts as torchtitan does.

        Raises:
            ValueError: their number is no multiple of the number of ranks.
        """
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            local_experts(self.inner_experts.num_experts, ep_size=mesh.size())
        super().parallelize(parallel_dims)

    # torchtitan reads shardings by the parameters' names.
    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sums over each token's experts, ``(B, L, D)``; a collective.

        Args:
            x_BLD: this rank's tokens, a plain tensor.
            topk_scores_BLK: weights of the sums.
            topk_expert_ids_BLK: global expert ids, int64.
            num_local_tokens_per_expert_E: unused.
        """
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        group = None if mesh is None else mesh.get_group()
        top_k = topk_expert_ids_BLK.shape[-1]
        with _unchecked():
            experts = self._local_experts()
            routing = Routing(
                topk_idx_TK=topk_expert_ids_BLK.reshape(-1, top_k),
                topk_weights_TK=topk_scores_BLK.reshape(-1, top_k),
            )
            x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
            y_TD = self._parallelism.run(x_TD, routing, experts, group=group)
            if not self._described:
                self._described = True
                path = self._parallelism.describe(experts, top_k=top_k, group=group)
                mark(self, f"halley: {path}")
            return y_TD.view(x_BLD.shape)

    def _local_experts(self) -> LocalExperts:
        inner = self.inner_experts
        weights = [_to_local(parameter) for parameter in inner.parameters()]
        num_local = weights[0].shape[0]
        if self._custom:
            reason = _custom_reason(inner)
            return LocalExperts(num_local=num_local, function=self._apply_own, reason=reason)
        gate, down, up = (
            _to_local(weight).to(_DTYPE) for weight in (inner.w1_EFD, inner.w2_EDF, inner.w3_EFD)
        )
        # Two parameters, one operand: a copy in each forward, which no view can save.
        stacked = Experts(up_LGD=torch.cat([gate, up], dim=1), down_LDF=down)
        return LocalExperts(num_local=num_local, function=self._apply_own, stacked=stacked)

    def _apply_own(self, rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        num_local = _to_local(next(self.inner_experts.parameters())).shape[0]
        with _sparse_mesh():
            return self.inner_experts(rows_RD, torch.bincount(ids_R, minlength=num_local))


@_override(target=_RoutedExperts.Config, description="routed experts run by Halley")
def halley(cfg: Any, *, strategy: str = "auto", strict: bool = False) -> Any:
    """Return the configuration of routed experts with Halley's in their place.

    torchtitan calls it for each layer when its flag ``--override.imports`` names it.

    Args:
        cfg: torchtitan's ``RoutedExperts.Config``.
        strategy, strict: as in ``HalleyRoutedExperts.Config``; given behind the flag's name as
            JSON, ``halley.integrations.torchtitan.halley={"strategy": "fused"}``.

    Returns:
        Halley's configuration; ``cfg`` itself, with a warning, where torchtitan has been told to
        run these experts in a way that Halley cannot.

    Raises:
        ValueError: there is no such strategy; or, if strict, instead of that warning.
    """
    parallelism = _parallelism(strategy, strict)
    if problem := _find_problem(cfg):
        parallelism.refuse(problem, instead="torchtitan runs them")
        return cfg
    return _derive(cfg, HalleyRoutedExperts.Config, strategy=strategy, strict=strict)


def _find_problem(cfg: Any) -> str:
    """Return why routed experts must be left to torchtitan, or ""."""
    if type(cfg) is not _RoutedExperts.Config:
        return f"routed experts ({type(cfg).__qualname__}) must be torchtitan's own RoutedExperts"
    dispatcher = type(cfg.token_dispatcher)
    if dispatcher not in (_Local.Config, _AllToAll.Config):
        # It may pad the rows, as some experts need, or drop tokens: another layer's arithmetic.
        return (
            f"token dispatcher ({dispatcher.__qualname__}) must be that of "
            'moe_comm_backend="standard"'
        )
    return ""


def _custom_reason(inner: Any) -> str:
    return f"experts module {type(inner).__name__} is no plain GroupedExperts"


def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
