"""An emulated link: the same values, no sooner than the link would have brought them."""

from dataclasses import replace

import pytest
import torch

from halley.kernels.switch import INTERPRETED
from tests.kernels.kernel_case import KernelCase, make_tokens
from tests.kernels.kernel_rank import KernelRank
from tests.kernels.kernel_world import run_forward, run_world


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")

CASE = KernelCase(num_tokens_CW=((40, 40),), num_experts=4, top_k=2, max_tokens=40)
SLOW = replace(CASE, knobs=replace(CASE.knobs, link_bytes_per_us=1000))


def test_values_do_not_depend_on_the_link() -> None:
    wanted = run_forward(CASE)
    for outputs, others in zip(run_forward(SLOW), wanted, strict=True):
        assert torch.equal(outputs[0], others[0])


def test_a_link_takes_its_time() -> None:
    """Of 40 tokens with 2 of 4 experts most go to the other rank: in, then back as sums."""

    def run(rank: KernelRank) -> tuple[list[int], int]:
        _, away = make_tokens(SLOW, 1 - rank.rank)
        own_experts = SLOW.num_experts // 2
        arriving = ((away.topk_idx_TK // own_experts) == rank.rank).any(1).sum()
        rank.forward(*make_tokens(SLOW, rank.rank))
        rank.check()
        return rank.status[1:].tolist(), int(arriving)

    for busy_ns, num_rows in run_world(SLOW, run):
        num_bytes = num_rows * SLOW.hidden_size * SLOW.dtype.itemsize
        assert num_rows > 20
        assert min(busy_ns) >= 1000 * num_bytes // SLOW.knobs.link_bytes_per_us
