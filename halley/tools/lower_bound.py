"""Measure the lower bound of a layer's time: its GEMMs alone, and its bytes over the wire alone.

The result lines call the larger of the two ``floor_us``.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from halley.distributed.mesh import ParallelGroups
from halley.ops.expert_gemm import grouped_linear
from halley.tools.layer_case import LayerTensors
from halley.tools.timer import time_interleaved


# Bytes per peer: enough that the bandwidth and not the latency of the link matters.
_PROBE_BYTES = {"cuda": 32 * 2**20, "cpu": 2 * 2**20}
_BLOCK_M = 128


def bound_gemms(tensors: LayerTensors, groups: ParallelGroups) -> dict[str, Callable[[], None]]:
    """Return the layer's two grouped GEMMs alone, by torch and on GPUs also by Halley's kernel.

    The lower bound takes the faster of the two.
    """
    bare = BareGemms(tensors, groups)
    if not bare.x_RD.is_cuda or not len(bare.x_RD):
        return {"torch gemms": bare}
    return {"torch gemms": bare, "triton gemms": TritonGemms(bare)}


class BareGemms:
    """The two GEMMs by torch, on as many rows as this rank's experts receive."""

    def __init__(self, tensors: LayerTensors, groups: ParallelGroups) -> None:
        first = groups.ep_rank // groups.tp_size * tensors.experts.num_local_experts
        last = first + tensors.experts.num_local_experts
        ends_L = tensors.counts_WE[:, first:last].sum(0).cumsum(0)
        experts = tensors.experts
        num_recv = int(ends_L[-1])
        inner = experts.down_LDF.shape[2]
        self.experts = experts
        self.ends_L = ends_L.to(tensors.x_TD.device, torch.int32)
        hidden = tensors.x_TD.shape[1]
        self.x_RD = tensors.x_TD.detach().new_empty(num_recv, hidden).normal_()
        self.h_RF = self.x_RD.new_empty(num_recv, inner).normal_()

    @torch.no_grad()
    def __call__(self) -> None:
        grouped_linear(self.x_RD, self.experts.up_LGD, ends_L=self.ends_L)
        grouped_linear(self.h_RF, self.experts.down_LDF, ends_L=self.ends_L)


class TritonGemms:
    """The two GEMMs by Halley's kernel, on rows padded to full blocks per expert."""

    def __init__(self, bare: BareGemms) -> None:
        # Imported here so that commands without kernels also run where Triton is missing.
        from halley.ops.kernels.gemm_config import GemmTile
        from halley.ops.kernels.grouped_gemm import grouped_gemm

        self.grouped_gemm = grouped_gemm
        # The epilogue of one tile overlaps the loads of the next, so it needs a buffer of its own
        # in shared memory. That buffer replaces one pipeline stage.
        self.tile = GemmTile(num_stages=3)
        counts_L = bare.ends_L.diff(prepend=bare.ends_L.new_zeros(1))
        tiles_L = (counts_L + _BLOCK_M - 1) // _BLOCK_M
        num_rows = int(tiles_L.sum()) * _BLOCK_M
        device = bare.x_RD.device
        experts = torch.arange(len(counts_L), dtype=torch.int32, device=device)
        self.experts = bare.experts
        self.tile_expert = experts.repeat_interleave(tiles_L)
        self.num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.x_RD = bare.x_RD.new_empty(num_rows, bare.x_RD.shape[1]).normal_()
        self.h_RF = bare.h_RF.new_empty(num_rows, bare.h_RF.shape[1]).normal_()
        self.up_RG = bare.x_RD.new_empty(num_rows, bare.experts.up_LGD.shape[1])
        self.down_RD = torch.empty_like(self.x_RD)

    def __call__(self) -> None:
        for out, rows, weight in (
            (self.up_RG, self.x_RD, self.experts.up_LGD),
            (self.down_RD, self.h_RF, self.experts.down_LDF),
        ):
            self.grouped_gemm(
                out,
                rows,
                weight,
                tile_expert=self.tile_expert,
                block_m=_BLOCK_M,
                tile=self.tile,
                num_programs=self.num_programs,
            )


def measure_link(groups: ParallelGroups, *, device: torch.device) -> float:
    """Return the bandwidth of an all-to-all in bytes/s out of each rank; 0 for one rank."""
    if groups.ep is None:
        return 0.0
    num_bytes = _PROBE_BYTES[device.type]
    sent = torch.empty(groups.ep_size * num_bytes, dtype=torch.uint8, device=device).random_()
    received = torch.empty_like(sent)

    def exchange() -> None:
        dist.all_to_all_single(received, sent, group=groups.ep)

    timing = time_interleaved({"link": exchange}, device=device, group=groups.ep)["link"]
    return (groups.ep_size - 1) * num_bytes / (timing.median_us * 1e-6)


def wire_us(tensors: LayerTensors, groups: ParallelGroups, *, link_bytes_per_s: float) -> float:
    """Return the time that dispatch (or combine) needs on the wire of the most loaded rank.

    A token is sent once to each destination rank, even if several of its experts are there, and to
    every rank of a tensor-parallel group. Combine sends one row back per (token, rank). The larger
    of the sent and the received bytes counts, because links work in both directions at once.

    Args:
        tensors: the layer of this rank.
        groups: the ranks that run the layer.
        link_bytes_per_s: the result of ``measure_link``.
    """
    if groups.ep is None:
        return 0.0
    set_TK = tensors.routed().topk_idx_TK // tensors.experts.num_local_experts
    num_sets = groups.ep_size // groups.tp_size
    goes_TS = torch.zeros(set_TK.shape[0], num_sets, device=set_TK.device)
    goes_TS.scatter_(1, set_TK, 1.0)
    rows_W = goes_TS.sum(0).repeat_interleave(groups.tp_size)
    rows_W[groups.ep_rank] = 0
    of_ranks = [torch.empty_like(rows_W) for _ in range(groups.ep_size)]
    dist.all_gather(of_ranks, rows_W, group=groups.ep)
    rows_WW = torch.stack(of_ranks)
    rows = torch.maximum(rows_WW.sum(0), rows_WW.sum(1)).max().item()
    num_bytes = rows * tensors.x_TD.shape[1] * tensors.x_TD.itemsize
    return num_bytes / link_bytes_per_s * 1e6
