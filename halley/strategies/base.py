"""One way to run routed experts under expert parallelism, in one file each.

A strategy says twice what it does: ``forward`` runs it, ``tasks`` sketches it for the simulator.
"""

import abc

import torch

from halley.core.types import Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task


class AbstractStrategy(abc.ABC):
    """Runs routed experts that are spread over the ranks of a group. Subclasses are final.

    Attributes:
        tp_size: neighbours of the group that share each expert, see ``core.sharding``.
    """

    tp_size: int = 1

    @abc.abstractmethod
    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        """Return the sum, over each token's experts, of weight times expert output, ``(T, D)``.

        A collective: all ranks of the group call it in the same order. They may hold different
        numbers of tokens, none included. Differentiable in ``x_TD``, in the routing weights and
        in the experts' weights; backward is a collective too.

        Args:
            x_TD: tokens of this rank, in the dtype of the experts' weights.
            routing: global expert ids and weights of each token.
            experts: the experts of this rank, ``[g * L, (g + 1) * L)`` with
                ``g = rank // tp_size``; where ranks share experts, its shards of them.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """

    @property
    def gemm(self) -> str:
        """Whose grouped GEMM multiplies: strategies with the same are equal bit for bit."""
        return "torch"

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        """Return why this strategy cannot run a layer, or ""; the same on all ranks.

        Args:
            experts: of any rank.
            top_k: experts of a token.
        """
        return ""

    def release(self) -> None:  # noqa: B027 - most keep nothing
        """Give back what is kept from call to call; a collective. The next call makes it anew."""

    @abc.abstractmethod
    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        """Return the work of one forward and backward pass on one rank, in order of issue."""


def wants_gradients(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> bool:
    """Return whether autograd would record a layer of these."""
    tensors = (x_TD, routing.topk_weights_TK, *experts.tensors().values())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_inputs(x_TD: torch.Tensor, experts: Experts) -> None:
    """Check that tokens and experts fit each other.

    Raises:
        ValueError: hidden sizes, dtypes or devices differ.
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
    """Return the experts in the dtype of autocast where it is on, as ``F.linear`` would."""
    kind = experts.up_LGD.device.type
    if not torch.is_autocast_enabled(kind):
        return experts
    dtype = torch.get_autocast_dtype(kind)
    return experts.with_tensors({name: t.to(dtype) for name, t in experts.tensors().items()})
