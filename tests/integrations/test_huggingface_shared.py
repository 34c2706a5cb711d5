"""Shared experts of transformers' blocks, begun before the routed ones."""

from pathlib import Path

import pytest
import torch

import halley.integrations.transformers as halley_hf
from tests.integrations.hf_case import (
    Mesh,
    Wanted,
    compare_step,
    load_spread,
    make_model,
    make_tokens,
    run_step,
    unregistered,
    write_case,
)
from tests.rank_pool import RunRanks


MESH = Mesh(ep_size=2, fsdp_size=2)


def _overlapped(rank: int, num_ranks: int, folder: Path, wanted: Wanted) -> list[str]:
    with unregistered():
        model = load_spread(folder, MESH, strategy="sequential")
        names = halley_hf.overlap_shared_experts(model)
        compare_step(model, wanted, MESH, tolerance=1e-5)
    return names


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_step_is_that_of_one_process(family: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    wanted = write_case(family, tmp_path)
    names = run_ranks(_overlapped, 2, tmp_path, wanted)[0]
    assert names == [f"model.layers.{i}.mlp" for i in ((0, 1) if family == "qwen2_moe" else (1,))]


def test_shared_experts_run_once_and_first() -> None:
    model = make_model("glm4_moe")
    block = model.model.layers[1].mlp
    order: list[str] = []
    block.experts.register_forward_hook(lambda *args: order.append("routed"))
    block.shared_experts.down_proj.register_forward_hook(lambda *args: order.append("shared"))
    run_step(model, make_tokens())
    halley_hf.overlap_shared_experts(model)
    run_step(model, make_tokens())
    assert order == ["routed", "shared", "shared", "routed"]


def test_other_rows_than_the_blocks_are_computed_anew() -> None:
    model = make_model("glm4_moe")
    block = model.model.layers[1].mlp
    x_BSD = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = [block.shared_experts(x) for x in (x_BSD[1:], 2 * x_BSD)]
        halley_hf.overlap_shared_experts(model)
        block(x_BSD)
        begun = block._forward_pre_hooks.values()
        for hook in begun:
            hook(block, (x_BSD,))
        part = block.shared_experts(x_BSD[1:])
        for hook in begun:
            hook(block, (x_BSD,))
        x_BSD.mul_(2)  # as a block may that adds noise to its input
        changed = block.shared_experts(x_BSD)
    assert torch.equal(part, wanted[0])
    assert torch.equal(changed, wanted[1])


def test_models_that_cannot_be_overlapped_are_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^model \(MixtralForCausalLM\) must have blocks with"):
        halley_hf.overlap_shared_experts(make_model("mixtral"))
    model = make_model("glm4_moe")
    assert halley_hf.overlap_shared_experts(model) == ["model.layers.1.mlp"]
    with pytest.raises(ValueError, match=r"^shared experts of model.layers.1.mlp must be overlap"):
        halley_hf.overlap_shared_experts(model)
