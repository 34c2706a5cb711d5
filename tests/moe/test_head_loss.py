"""The loss in chunks equals ``F.cross_entropy`` of all logits, compiled and by lanes as well."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from halley.compiler import compile_function
from halley.distributed.mesh import build_groups
from halley.lanes import compile_step
from halley.moe import head_loss
from halley.moe.dense import next_token_loss
from halley.moe.head_loss import chunked_loss, needs_chunks
from tests.compiler.model_case import fresh_graphs
from tests.gpus import needs_gpu
from tests.lanes.lane_case import is_equal, make_batch, take_result
from tests.moe.model_case import MODELS, build_model, destroy
from tests.rank_pool import RunRanks


VOCAB, HIDDEN = 37, 11
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _make_inputs(batch_size: int, dtype: torch.dtype) -> Result:
    generator = torch.Generator().manual_seed(batch_size)
    hidden_BSD = torch.randn(batch_size, 5, HIDDEN, generator=generator).to(dtype)
    weight_VD = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    targets_BS = torch.randint(VOCAB, (batch_size, 5), generator=generator)
    return hidden_BSD.requires_grad_(), weight_VD.requires_grad_(), targets_BS


def _differentiate(loss: torch.Tensor, hidden_BSD: torch.Tensor, weight_VD: torch.Tensor) -> Result:
    """Return a loss, and the gradients of its third: as in a step of three microbatches."""
    grad_hidden_BSD, grad_weight_VD = torch.autograd.grad(loss / 3, (hidden_BSD, weight_VD))
    return loss.detach(), grad_hidden_BSD, grad_weight_VD


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 15, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_those_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, dtype: torch.dtype
) -> None:
    """With 15 tokens, chunks of 4 and 7 leave a shorter last chunk."""
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", chunk_tokens * VOCAB * dtype.itemsize)
    hidden_BSD, weight_VD, targets_BS = _make_inputs(3, dtype)
    loss = chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS)
    got = _differentiate(loss, hidden_BSD, weight_VD)
    assert loss.dtype == torch.float32
    # The reference rounds nothing, so bfloat16 gradients differ by their rounding: 2**-8.
    exact_BSV = hidden_BSD.double() @ weight_VD.double().t()
    wanted_loss = F.cross_entropy(exact_BSV.flatten(0, 1), targets_BS.flatten())
    wanted = _differentiate(wanted_loss, hidden_BSD, weight_VD)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for value, exact in zip(got, wanted, strict=True):
        error = (value.double() - exact.double()).norm() / exact.double().norm()
        assert error < tolerance
    assert [value.dtype for value in got[1:]] == [dtype, dtype]


def test_weight_gradient_of_bfloat16_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 equal chunks: a bfloat16 sum would stop growing at 256 times its summand."""
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 1)
    hidden_BSD = torch.ones(1, 512, 1, dtype=torch.bfloat16)
    weight_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets_BS = torch.zeros(1, 512, dtype=torch.int64)
    chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS).backward()
    assert weight_VD.grad is not None
    assert weight_VD.grad.tolist() == [[-0.5], [0.5]]  # probabilities (1/2, 1/2) minus (1, 0)


def test_no_tokens_have_no_mean() -> None:
    """``F.cross_entropy`` gives nan as well; gradients must have their shapes."""
    hidden_BSD, weight_VD, targets_BS = _make_inputs(0, torch.float32)
    loss = chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS)
    assert loss.isnan()
    loss.backward()
    assert hidden_BSD.grad is not None
    assert hidden_BSD.grad.shape == (0, 5, HIDDEN)
    assert weight_VD.grad is not None
    assert weight_VD.grad.shape == (VOCAB, HIDDEN)


def test_without_gradients_the_loss_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 4 * VOCAB * 4)
    hidden_BSD, weight_VD, targets_BS = _make_inputs(3, torch.float32)
    wanted = chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS)
    with torch.no_grad():
        got = chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS)
    assert torch.equal(got, wanted)
    assert not got.requires_grad


def test_autocast_computes_in_the_dtype_of_the_weight() -> None:
    hidden_BSD, weight_VD, targets_BS = _make_inputs(3, torch.float32)
    want = _differentiate(
        chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS), hidden_BSD, weight_VD
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS)
    assert all(map(torch.equal, _differentiate(loss, hidden_BSD, weight_VD), want))


def test_when_chunks_save_memory() -> None:
    """Small logits keep their path; so do few tokens, whose logits take less than the sum."""
    qwen = {"vocab_size": 151936, "hidden_size": 2048, "itemsize": 2}
    assert needs_chunks(8192, **qwen)
    assert not needs_chunks(4096, **qwen)  # as many bytes as the float32 sum: 2 * 4096 = 4 * 2048
    assert needs_chunks(4097, **qwen)
    small = {"vocab_size": 1024, "hidden_size": 8, "itemsize": 2}
    assert not needs_chunks(2**18, **small)  # 512 MiB
    assert needs_chunks(2**18 + 1, **small)


def test_model_compiled_by_the_passes_has_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, with the passes: loss, router loss, counts and gradients of all parameters."""
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 5 * 32 * 4)
    model = build_model(MODELS["softmax"])
    tokens_BS, targets_BS = make_batch(0, batch_size=2)
    output = model(tokens_BS)
    wanted = [next_token_loss(output.logits_BSV, targets_BS), *output[1:]]
    (wanted[0] + wanted[1]).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    functional = build_model(MODELS["softmax"], strategy="functional")
    compiled = compile_function(functional.losses, inner="eager", agree=False)
    got = compiled(tokens_BS, targets_BS)
    (got.loss + got.router_loss).backward()
    torch.testing.assert_close(list(got), wanted)
    for name, parameter in functional.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


@needs_gpu
@pytest.mark.parametrize("inner", ["", "eager", "inductor"])
def test_bfloat16_on_a_gpu_eager_and_compiled(monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """There the operators run compiled functions, and the GEMM adds to a float32 matrix."""
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 100 * 512 * 2)
    generator = torch.Generator("cuda").manual_seed(0)
    place = {"device": "cuda", "generator": generator}
    hidden_BSD, weight_VD = (
        torch.randn(*shape, 64, dtype=torch.bfloat16, **place).requires_grad_()
        for shape in ((2, 150), (512,))
    )
    targets_BS = torch.randint(512, (2, 150), **place)

    def loss(hidden_BSD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        return chunked_loss(hidden_BSD, weight_VD, targets_BS=targets_BS)

    run = compile_function(loss, inner=inner, agree=False) if inner else loss
    got = _differentiate(run(hidden_BSD, weight_VD), hidden_BSD, weight_VD)
    logits_BSV = (hidden_BSD @ weight_VD.t()).float()
    wanted_loss = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
    wanted = _differentiate(wanted_loss, hidden_BSD, weight_VD)
    for value, other in zip(got, wanted, strict=True):
        assert (value.float() - other.float()).norm() < 0.005 * other.float().norm()


def _run_lanes(rank: int, num_ranks: int) -> bool:
    """Return whether steps in lanes have the results of one microbatch after another."""
    groups = build_groups(num_ranks, device_type="cpu")
    config = replace(MODELS["softmax"], num_layers=1)
    model = build_model(config, strategy="functional", groups=groups)
    batch = make_batch(rank, batch_size=4)

    def loss(tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        output = model.losses(tokens_BS, targets_BS)
        return output.loss + output.router_loss

    with mock.patch.object(head_loss, "CHUNK_BYTES", 5 * 32 * 4), fresh_graphs():
        wanted = [loss(*each) for each in zip(*(part.chunk(2) for part in batch), strict=True)]
        for each in wanted:
            each.backward()
        expected = take_result(torch.stack(wanted), model)
        step = compile_step(loss, 2, inner="eager")
        results = [take_result(step(*batch), model) for _ in range(4)]
        assert step.fallback == ""
        assert step.plan is not None
    destroy(groups)
    return all(is_equal(result, expected) for result in results)


def test_lanes_have_the_same_losses_and_gradients(run_ranks: RunRanks) -> None:
    """The operator of the head is in the graph of each microbatch."""
    assert run_ranks(_run_lanes, 2, timeout_s=60.0) == [True, True]
