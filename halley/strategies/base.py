"""The interface of strategies: ways to run routed experts that are spread over ranks.

A strategy has two descriptions of its work: ``forward`` runs it, and ``tasks`` lists it for the
simulator.
"""

import abc

import torch

from halley.core.types import Experts, LayerShape, Routing
from halley.cost.hardware import Predictor
from halley.cost.simulate import Task


class AbstractStrategy(abc.ABC):
    """Runs routed experts that are spread over the ranks of a group. Subclasses are final.

    To add a strategy, implement ``forward`` and ``tasks``.

    Attributes:
        tp_size: adjacent ranks of the group that share each expert, see ``core.sharding``.
    """

    tp_size: int = 1

    @abc.abstractmethod
    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        """Return the sum, over each token's experts, of weight times expert output, ``(T, D)``.

        A collective: all ranks of the group call it in the same order. Ranks may have different
        numbers of tokens, also none. Differentiable in ``x_TD``, in the routing weights and in the
        experts' weights; backward is a collective too.

        Args:
            x_TD: tokens of this rank, in the dtype of the experts' weights.
            routing: global expert ids and weights of each token.
            experts: the experts of this rank, ids ``[g * L, (g + 1) * L)`` with
                ``g = rank // tp_size``; its shards of them if ``tp_size`` is above 1.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """

    @property
    def gemm(self) -> str:
        """Name of the grouped GEMM; strategies with the same name have equal results, bitwise."""
        return "torch"

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        """Return why this strategy cannot run a layer, or ""; the same text on all ranks.

        Args:
            experts: the experts of this rank.
            top_k: experts of each token.
        """
        return ""

    def release(self) -> None:  # noqa: B027 - most strategies have no buffers
        """Free the buffers that the strategy keeps between calls; a collective.

        The next call allocates them again.
        """

    @abc.abstractmethod
    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        """Return the work of one forward and backward pass of one rank, in order of issue.

        Args:
            shape: sizes of the layer.
            predictor: predicts the duration of each task.
        """


def wants_gradients(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> bool:
    """Return whether autograd records a layer with these inputs."""
    tensors = (x_TD, routing.topk_weights_TK, *experts.tensors().values())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_inputs(x_TD: torch.Tensor, experts: Experts) -> None:
    """Check that tokens and experts have the same hidden size, dtype and device.

    Raises:
        ValueError: one of them differs.
    """
    if x_TD.ndim != 2 or x_TD.shape[1] != experts.up_LGD.shape[2]:
        raise ValueError(
            f"x {tuple(x_TD.shape)} must be (num_tokens, hidden_size) with hidden_size "
            f"{experts.up_LGD.shape[2]}"
        )
    if x_TD.dtype != experts.up_LGD.dtype:
        raise ValueError(
            f"x dtype ({x_TD.dtype}) must be that of the experts' weights ({experts.up_LGD.dtype})"
        )
    if x_TD.device != experts.up_LGD.device:
        raise ValueError(
            f"x device ({x_TD.device}) must be that of the experts' weights "
            f"({experts.up_LGD.device})"
        )


def under_autocast(experts: Experts) -> Experts:
    """Return the experts, cast to the dtype of autocast if it is enabled, as for ``F.linear``."""
    kind = experts.up_LGD.device.type
    if not torch.is_autocast_enabled(kind):
        return experts
    dtype = torch.get_autocast_dtype(kind)
    return experts.with_tensors({name: t.to(dtype) for name, t in experts.tensors().items()})
