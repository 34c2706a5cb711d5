"""Estimated bytes of a step, compared with measurements on GPUs and with tensors saved on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from halley.core.config import ModelConfig, MoEConfig
from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.moe.dense import rotary_table
from halley.moe.memory_check import num_parameters
from halley.moe.memory_estimate import (
    Parallelism,
    estimate_memory,
    expert_weights,
    saved_by_attention,
    saved_by_feed_forward,
    saved_by_router,
)
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategy


# Measured with ``ep_size`` 2: model, layers, strategy, tokens; GB at rest, and peak. The rows of
# Qwen3 with 6 and of Mixtral with 2 layers and "fused" are from 2 x H200. The others are from
# 2 x H100, where fused layers still kept received rows between passes.
MEASURED = (
    ("qwen3-30b-a3b", 6, "fused", 8192, 35.76, 46.69),
    ("qwen3-30b-a3b", 3, "fused", 8192, 22.85, 29.92),
    ("qwen3-30b-a3b", 6, "sequential", 4096, 35.76, 46.64),
    ("mixtral-8x7b", 2, "fused", 8192, 24.64, 32.80),
    ("mixtral-8x7b", 1, "sequential", 8192, 14.19, 19.18),
    ("olmoe", 8, "fused", 8192, 27.96, 37.6),
)


@pytest.mark.parametrize(("name", "layers", "strategy", "tokens", "at_rest", "peak"), MEASURED)
def test_estimate_is_within_5_percent_of_measurements(
    name: str, layers: int, strategy: str, tokens: int, at_rest: float, peak: float
) -> None:
    """A wrong estimate would list layouts as feasible that run out of memory."""
    model = replace(find_model(name), num_layers=layers)
    where = Parallelism(strategy=strategy, ep_size=2, num_ranks=2)
    found = estimate_memory(model, where, num_tokens=tokens)
    assert found.at_rest / 1e9 == pytest.approx(at_rest, rel=0.05)
    assert found.peak / 1e9 == pytest.approx(peak, rel=0.05)


def _small(qk_norm: str = "none", *, shared: int = 0) -> ModelConfig:
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2}
    moe = MoEConfig(num_experts=8, top_k=2, intermediate_size=96, shared_intermediate_size=shared)
    rest = {"head_dim": 32, "qk_norm": qk_norm, "moe": moe}
    return ModelConfig(name="small", num_layers=1, **sizes, **rest)


def _saved_bytes(config: ModelConfig, strategy: str) -> dict[torch.dtype, int]:
    """Return the bytes that a block saves for backward, without its norms and the rotation.

    On a CPU, these are not one kernel each, and save more than on a GPU.
    """
    recorder = Recorder("cpu", enabled=False)
    runs = build_strategy(strategy, None, recorder=recorder, device="cpu")
    place = {"groups": ParallelGroups(), "recorder": recorder, "dtype": torch.bfloat16}
    model = MoETransformer(config, strategy=runs, **place)
    model.init_weights(seed=0)
    (block,) = model.layers
    norms = [module for module in block.modules() if isinstance(module, nn.RMSNorm)]
    storages: dict[int, torch.Tensor] = {}
    inside: list[nn.Module] = []
    for norm in norms:
        norm.register_forward_pre_hook(lambda module, args: inside.append(module))
        norm.register_forward_hook(lambda module, args, out: inside.clear())
    rotary = rotary_table(config, 128, device="cpu")
    left_out = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        is_rotary = tensor.shape == rotary.shape[1:]
        if not inside and not is_rotary and tensor.untyped_storage().data_ptr() not in left_out:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x_BSD = torch.randn(2, 128, config.hidden_size).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x_BSD, rotary)
    found = dict[torch.dtype, int]()
    for each in storages.values():
        found[each.dtype] = found.get(each.dtype, 0) + each.untyped_storage().nbytes()
    return found


def _outside_norms(config: ModelConfig, num_tokens: int) -> float:
    """Return the formulas of attention, router and shared expert, without inputs of norms."""
    columns, num_floats = 2 * config.hidden_size, 2
    if config.qk_norm != "none":
        heads = config.num_heads + config.num_kv_heads
        columns += heads * config.head_dim
        num_floats += heads if config.qk_norm == "head" else 2
    saved = saved_by_attention(config, num_tokens) + saved_by_router(config, num_tokens)
    saved += saved_by_feed_forward(config, config.moe.shared_intermediate_size, num_tokens)
    return saved - num_tokens * (2 * columns + 4 * num_floats)


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_saved_bytes_of_a_sequential_block_equal_the_formula(qk_norm: str) -> None:
    """256 tokens, 512 rows: x, gate and up, silu(gate), its multiple; returned rows; orders."""
    config = _small(qk_norm)
    experts = 512 * 2 * (64 + 2 * 96 + 96 + 96) + 512 * 64 * 2 + 512 * (8 + 8 + 4 + 4)
    found = sum(_saved_bytes(config, "sequential").values())
    assert found == pytest.approx(_outside_norms(config, 256) + experts, abs=8 * 8)  # counts
    where = Parallelism(strategy="sequential", ep_size=1, num_ranks=1)
    whole = estimate_memory(config, where, num_tokens=256).saved
    head = 256 * 2 * (64 + 64 + 256)
    assert whole == saved_by_attention(config, 256) + saved_by_router(config, 256) + experts + head


def test_saved_bytes_of_a_fused_block_equal_the_formula() -> None:
    """Of the experts, the block saves rows and pre-activations, and a plan in int32."""
    config = _small(shared=32)
    found = _saved_bytes(config, "fused")
    del found[torch.int32]
    num_rows = (sum(found.values()) - _outside_norms(config, 256)) / (2 * (64 + 2 * 96))
    assert 512 <= num_rows <= 512 + 8 * 16  # whole tiles of 16 rows for each of 8 experts
    assert num_rows == pytest.approx(round(num_rows), abs=1)


def test_states_are_divided_over_copies() -> None:
    """Qwen3 on 16 ranks, two copies of each expert and 16 of all other weights."""
    model = find_model("qwen3-30b-a3b")
    number = num_parameters(model, ep_size=8, tp_size=1)
    experts = 48 * sum(expert_weights(model, ep_size=8))
    assert experts == 48 * 16 * 3 * 2048 * 768
    divided = experts / 2 + (number - experts) / 16
    where = Parallelism(strategy="sequential", ep_size=8, num_ranks=16)
    for shard, weights, others in (("none", number, number), ("optimizer", number, divided),
                                   ("all", divided, divided)):  # fmt: skip
        found = estimate_memory(model, replace(where, shard=shard), num_tokens=8192)
        assert (found.weights, found.optimizer) == (2 * weights, 12 * others)
        assert found.gradients == 4 * weights


def test_without_kernels_strategies_across_nodes_save_as_sequential() -> None:
    """On GPUs older than Hopper, all-to-alls run inside a node, and no buffers are shared."""
    model = find_model("mixtral-8x7b")
    where = Parallelism(strategy="deduplicated", ep_size=8, num_ranks=8, num_nodes=8)
    plain = replace(where, strategy="sequential", num_nodes=1)
    found, want = (
        estimate_memory(model, each, num_tokens=8192)
        for each in (replace(where, can_fuse=False), plain)
    )
    assert found.buffers == 0
    assert found.saved == want.saved
    assert estimate_memory(model, where, num_tokens=8192).buffers > 0


def test_recomputed_blocks_save_their_inputs() -> None:
    model = find_model("qwen3-30b-a3b")
    where = Parallelism(strategy="fused", ep_size=8, num_ranks=8)
    plain = estimate_memory(model, where, num_tokens=8192)
    again = estimate_memory(model, replace(where, recompute=True), num_tokens=8192)
    head = 2 * 8192 * 2048 * 2 + 151936 * 2048 * 2  # norm's input and gradient; matrix's gradient
    assert again.saved == 48 * 8192 * 2048 * 2 + head
    assert again.peak < plain.peak - (plain.saved - again.saved) / 2
    more = estimate_memory(model, where, num_tokens=8192, load=2.0)
    assert more.saved - plain.saved == pytest.approx(48 * 65536 * (2048 + 1536) * 2, rel=0.02)
