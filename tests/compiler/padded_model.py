"""A small model whose all-to-alls have fixed sizes, so that Inductor compiles it in seconds."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn


HIDDEN_SIZE = 16
NUM_TOKENS = 24
NUM_LAYERS = 2


class PaddedMoE(nn.Module):
    """Top-1 experts, one per rank, with a capacity; a token above it adds nothing."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, num_ranks = group, group.size()
        self.num_ranks, self.capacity = num_ranks, NUM_TOKENS // num_ranks
        self.gate = nn.Linear(HIDDEN_SIZE, num_ranks, bias=False)
        self.up = nn.Linear(HIDDEN_SIZE, 2 * HIDDEN_SIZE, bias=False)
        self.down = nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_T, expert_T = self.gate(x_TD).softmax(dim=-1).max(dim=-1)
        chosen_TE = F.one_hot(expert_T, self.num_ranks)
        place_T = (chosen_TE.cumsum(dim=0) * chosen_TE).sum(dim=-1) - 1
        kept_T = place_T < self.capacity
        slot_T = expert_T * self.capacity + place_T.clamp(max=self.capacity - 1)
        sent_ND = x_TD.new_zeros(self.num_ranks * self.capacity, HIDDEN_SIZE)
        sent_ND = sent_ND.index_add(0, slot_T, x_TD * kept_T[:, None])
        back_ND = self._exchange(self.down(torch.relu(self.up(self._exchange(sent_ND)))))
        return back_ND[slot_T] * (weight_T * kept_T)[:, None]

    def _exchange(self, rows_ND: torch.Tensor) -> torch.Tensor:
        splits = [self.capacity] * self.num_ranks
        return fc.wait_tensor(fc.all_to_all_single_autograd(rows_ND, splits, splits, self.group))


class PaddedModel(nn.Module):
    """Residual layers of a dense network and experts, which are distributed over all ranks.

    Args:
        num_layers: number of layers.
        breaks: break the graph before the experts of each layer.
    """

    def __init__(self, *, num_layers: int = NUM_LAYERS, breaks: bool = False) -> None:
        super().__init__()
        group = dist.group.WORLD
        assert group is not None
        self.breaks = breaks
        self.dense = nn.ModuleList(
            nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False) for _ in range(num_layers)
        )
        self.moe = nn.ModuleList(PaddedMoE(group) for _ in range(num_layers))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        for dense, moe in zip(self.dense, self.moe, strict=True):
            x_TD = x_TD + torch.relu(dense(x_TD))
            if self.breaks:
                torch._dynamo.graph_break()
            x_TD = x_TD + moe(x_TD)
        return x_TD
