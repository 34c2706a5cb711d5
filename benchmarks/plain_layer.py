"""Compare the sequential strategy with a short MoE layer written in plain PyTorch.

The plain layer uses autograd for its gradients and ``bincount`` for its counts. Small layers are
limited by the host, so both are timed in alternation on the same host.

    torchrun --nproc-per-node 4 -m benchmarks.plain_layer benchmarks/results
"""

import json
import sys
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Task
from halley.cost.hardware import Predictor
from halley.distributed.mesh import build_groups, join_world
from halley.strategies.all_to_all import all_to_all_tasks
from halley.strategies.base import AbstractStrategy
from halley.tools.candidates import build_candidates, measure_link
from halley.tools.layer_bench import bench_layer
from halley.tools.layer_case import LayerCase
from halley.tools.timer import Row, machine_keys, write_rows


MODELS = ("mixtral-8x7b", "phi-3.5-moe", "qwen2-moe", "qwen3-30b-a3b", "deepseek-v3")
NUM_TOKENS = (2048, 8192)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, received, sent):
        ctx.splits = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.splits), None, None


@final
class PlainStrategy(AbstractStrategy):
    """An MoE layer by plain indexing: sort, all-to-all, sort, grouped GEMMs, and back."""

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_ranks, num_local = dist.get_world_size(), experts.num_local_experts
        idx_N = routing.topk_idx_TK.flatten()
        top_k = routing.topk_idx_TK.shape[1]
        order_N = idx_N.argsort(stable=True)
        counts_E = torch.bincount(idx_N, minlength=num_ranks * num_local)
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E)
        received_WL = received_E.view(num_ranks, num_local)
        table = torch.stack([counts_E.view(num_ranks, num_local).sum(1), received_WL.sum(1)])
        sent, received = table.tolist()
        rows_RD = _AllToAll.apply(x_TD[order_N // top_k], received, sent)
        expert_R = torch.arange(num_local, device=x_TD.device).repeat(num_ranks)
        expert_R = expert_R.repeat_interleave(received_E, output_size=sum(received))
        by_expert_R = expert_R.argsort(stable=True)
        ends_L = received_WL.sum(0).cumsum(0).to(torch.int32)
        h_RG = F.grouped_mm(rows_RD[by_expert_R], experts.up_LGD.transpose(1, 2), offs=ends_L)
        gate_RF, up_RF = h_RG.chunk(2, dim=-1)
        y_RD = F.grouped_mm(F.silu(gate_RF) * up_RF, experts.down_LDF.transpose(1, 2), offs=ends_L)
        back_ND = _AllToAll.apply(y_RD[by_expert_R.argsort()], sent, received)
        by_slot_TKD = back_ND[order_N.argsort()].view(x_TD.shape[0], top_k, -1)
        return (by_slot_TKD * routing.topk_weights_TK[..., None].to(x_TD.dtype)).sum(1)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return all_to_all_tasks(shape, predictor, num_chunks=1)


def main() -> None:
    folder, commit = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    with join_world("cuda") as world:
        groups = build_groups(0, device_type="cuda")
        recorder = Recorder(world.device, enabled=False)
        machine = machine_keys(groups, device=world.device, commit=commit)
        link = measure_link(groups, device=world.device)
        rows: list[Row] = []
        for name in MODELS:
            for num_tokens in NUM_TOKENS:
                case = LayerCase(model=find_model(name), num_tokens=num_tokens)
                candidates = build_candidates(
                    case, ["sequential"], groups=groups, recorder=recorder, device=world.device
                )
                found = bench_layer(
                    case,
                    candidates | {"plain": PlainStrategy()},
                    groups=groups,
                    recorder=recorder,
                    device=world.device,
                    link_bytes_per_s=link,
                )
                rows += [row | machine | {"case": "plain_layer"} for row in found]
                torch.cuda.empty_cache()
        if world.is_first:
            write_rows(rows, folder)
            for row in rows:
                sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
