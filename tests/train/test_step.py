"""Steps that must not depend on how the same batch is spread over ranks and microbatches."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from halley.core.config import ModelConfig, OptimizerConfig, RunConfig
from halley.train.checkpoint import load_checkpoint, save_checkpoint
from halley.train.step import TrainingRun, build_run, open_corpus, train_step
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    ADAMW,
    SGD,
    SIGMOID,
    SMALL,
    built,
    make_config,
    make_world,
    write_text,
)


NUM_STEPS = 12
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def _whole_parameters(run: TrainingRun) -> Tensors:
    """Return all parameters as one rank would hold them."""
    parameters = run.optimizer.state()["parameters"]
    assert isinstance(parameters, dict)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in parameters.items()
    }


def _take_steps(
    rank: int, num_ranks: int, config: RunConfig, num_steps: int = NUM_STEPS
) -> tuple[list[float], list[float], Tensors]:
    """Return the loss and the gradient norm of each step, and the parameters after the last."""
    with built(config, rank=rank, num_ranks=num_ranks) as run:
        results = [train_step(run, step) for step in range(num_steps)]
        parameters = _whole_parameters(run)
    return [r.loss for r in results], [r.grad_norm for r in results], parameters


def _difference(got: Tensors, want: Tensors) -> float:
    """Return the largest difference of a parameter as a share of its norm."""
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).norm() / want[name].norm()) for name in want)


@pytest.mark.parametrize(
    ("num_microbatches", "model", "optimizer", "rtol"),
    [
        (2, SIGMOID, SGD, 1e-6),
        (1, SMALL, ADAMW, 1e-4),
    ],
    ids=["sgd accumulated, sigmoid", "adamw"],
)
def test_the_curve_does_not_depend_on_the_ranks(
    run_ranks: RunRanks,
    text: Path,
    num_microbatches: int,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    rtol: float,
):
    config = make_config(text, model=model, optimizer=optimizer)
    alone = dataclasses.replace(config.train, num_microbatches=4 * num_microbatches)
    losses, norms, parameters = _take_steps(0, 1, dataclasses.replace(config, train=alone))
    assert losses[-1] < losses[0] - 0.5
    shared = dataclasses.replace(config.train, num_microbatches=num_microbatches)
    for ep_size, tp_size in ((1, 1), (2, 1), (4, 2)):
        spread = dataclasses.replace(config, train=shared, ep_size=ep_size, expert_tp_size=tp_size)
        for got in run_ranks(_take_steps, 4, spread):
            assert got[0] == pytest.approx(losses, rel=rtol)
            if optimizer is SGD:
                assert got[1] == pytest.approx(norms, rel=1e-5)
                assert _difference(got[2], parameters) < rtol


def test_the_ranks_stay_equal_bit_for_bit(run_ranks: RunRanks, text: Path):
    config = make_config(text, optimizer=ADAMW, ep_size=2)
    first, *others = run_ranks(_take_steps, 4, config)
    for other in others:
        assert other[:2] == first[:2]
        torch.testing.assert_close(other[2], first[2], rtol=0, atol=0)


def _take_chunked_steps(rank: int, num_ranks: int, config: RunConfig) -> list[list[float]]:
    return [
        _take_steps(rank, num_ranks, each)[0]
        for each in (config, dataclasses.replace(config, strategy="chunked", num_chunks=3))
    ]


def test_the_curve_does_not_depend_on_the_strategy(run_ranks: RunRanks, text: Path):
    config = make_config(text)
    for sequential, chunked in run_ranks(_take_chunked_steps, 2, config):
        assert chunked == pytest.approx(sequential, rel=1e-6)


def test_activation_checkpointing_changes_no_bit(run_ranks: RunRanks, text: Path):
    curves = []
    for on in (False, True):
        config = make_config(text, model=SIGMOID, activation_checkpointing=on, num_microbatches=2)
        curves.append(run_ranks(_take_steps, 2, config, 4))
    for got, want in zip(curves[1], curves[0], strict=True):
        assert got[:2] == want[:2]
        torch.testing.assert_close(got[2], want[2], rtol=0, atol=0)


@pytest.fixture
def deterministic_ends() -> Iterator[None]:
    """Restore the process-wide settings of torch after each test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore


@pytest.mark.usefixtures("deterministic_ends")
def test_deterministic_runs_have_the_same_bits(text: Path):
    """All that a step calls has a kernel for it: torch raises where there is none."""
    curves = []
    for on in (True, True, False):
        assert torch.are_deterministic_algorithms_enabled() == bool(curves)
        config = make_config(text, model=SIGMOID, deterministic=on)
        curves.append(_take_steps(0, 1, config, 3))
    for other in curves[1:]:
        assert other[:2] == curves[0][:2]
        torch.testing.assert_close(other[2], curves[0][2], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_bfloat16_parameters_are_the_rounded_masters(text: Path, optimizer: OptimizerConfig):
    config = make_config(text, optimizer=optimizer, dtype="bfloat16", num_microbatches=2)
    with built(config) as run:
        losses = [train_step(run, step).loss for step in range(NUM_STEPS)]
        for name, parameter in run.model.named_parameters():
            master = run.optimizer.masters[name]
            assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
            assert parameter.equal(master.bfloat16())
            assert not master.equal(parameter.float())  # float32 holds what bfloat16 cannot
    float32, _, _ = _take_steps(0, 1, make_config(text, optimizer=optimizer, num_microbatches=2))
    assert losses == pytest.approx(float32, rel=0.02)
    assert losses[-1] < losses[0] - 0.5


def _biases(run: TrainingRun) -> list[list[float]]:
    return [router.bias.tolist() for router in run.routers()]


def _follow_biases(rank: int, num_ranks: int, config: RunConfig) -> tuple[list, list]:
    """Return the biases after two steps, and as the loads of all ranks' microbatches say."""
    counts: list[torch.Tensor] = []
    with built(config, rank=rank, num_ranks=num_ranks) as run:
        run.model.register_forward_hook(lambda *call: counts.append(call[-1].counts_ME))
        want = torch.zeros(2, 8)
        for step in range(2):
            counts.clear()
            train_step(run, step)
            load_ME = torch.stack(counts).sum(dim=0).float()
            if num_ranks > 1:
                dist.all_reduce(load_ME)
            # 2 sequences of 16 tokens with 2 experts each, of 2 microbatches
            assert load_ME.sum(dim=1).tolist() == [2 * 16 * 2 * 2 * num_ranks] * 2
            want += 0.001 * (load_ME.mean(dim=1, keepdim=True) - load_ME).sign()
        return _biases(run), want.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_router_biases_follow_the_load_of_the_whole_step(
    run_ranks: RunRanks, text: Path, num_ranks: int
):
    config = make_config(text, model=SIGMOID, num_microbatches=2)
    results = run_ranks(_follow_biases, num_ranks, config)
    for got, want in results:
        assert got == want
        assert got == results[0][0]
        assert any(value != 0 for layer in got for value in layer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_router_biases_and_masters_are_resumed(text: Path, tmp_path: Path, dtype: str):
    config = make_config(text, model=SIGMOID, optimizer=ADAMW, dtype=dtype)
    with built(config) as old, built(config) as new:
        for step in range(3):
            train_step(old, step)
        path = save_checkpoint(tmp_path / "checkpoints", old.state(), step=3, keep=1)
        assert load_checkpoint(path, new.state()) == 3
        new.optimizer.resume(3)
        assert _biases(new) == _biases(old)
        for step in range(3, 6):
            assert train_step(new, step) == train_step(old, step)
        assert _biases(new) == _biases(old)
        torch.testing.assert_close(new.state(), old.state(), rtol=0, atol=0)
        torch.testing.assert_close(new.model.state_dict(), old.model.state_dict(), rtol=0, atol=0)


def test_one_step_by_hand(text: Path):
    """The loss is the mean over microbatches, and SGD moves by the rate times its gradient."""
    optimizer = OptimizerConfig(
        kind="sgd", learning_rate=0.5, warmup_steps=0, clip_norm=0.0, weight_decay=0.0
    )
    config = make_config(text, optimizer=optimizer, num_microbatches=3)
    with built(config) as run, built(config) as peer:
        result = train_step(run, 0)
        total = torch.zeros(())
        for microbatch in range(3):
            tokens_BS, targets_BS = peer.loader.batch(0, microbatch)
            out = peer.model(tokens_BS)
            picked = out.logits_BSV.log_softmax(-1).gather(2, targets_BS[:, :, None])
            total = total + (out.router_loss - picked.mean()) / 3
        total.backward()
        want = {}
        for name, parameter in peer.model.named_parameters():
            assert parameter.grad is not None
            want[name] = parameter.detach() - 0.5 * parameter.grad
        assert result.loss + result.router_loss == pytest.approx(total.item(), rel=1e-6)
        torch.testing.assert_close(dict(run.model.named_parameters()), want, rtol=1e-5, atol=1e-7)
        assert result.learning_rate == 0.5
        assert run.tokens_per_step == 3 * 2 * 16


def test_too_small_a_vocabulary_is_named(text: Path):
    config = make_config(text, model=dataclasses.replace(SMALL, vocab_size=255))
    with pytest.raises(ValueError, match=r"model\.vocab_size \(255\) must be at least 256"):
        build_run(config, make_world())


def test_too_short_a_text_is_named(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("x" * 16)
    with pytest.raises(ValueError, match=r"text of 16 bytes in 1 files must hold at least one"):
        open_corpus(make_config(path))
