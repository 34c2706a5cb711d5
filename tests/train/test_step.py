"""Training steps do not depend on the number of ranks, and the times of their parts add up."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from halley.core.config import OptimizerConfig, RunConfig
from halley.moe import head_loss
from halley.train.checkpoint import load_checkpoint, save_checkpoint
from halley.train.compare import EXPOSED, STEP, _summarise, compare_strategies
from halley.train.step import TrainingRun, train_step
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    ADAMW,
    SGD,
    SIGMOID,
    SMALL,
    built,
    change_training,
    make_config,
    make_world,
    write_text,
)


NUM_STEPS = 8
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def _whole_parameters(run: TrainingRun) -> Tensors:
    """Return all parameters whole, as a single rank holds them."""
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
    """Return the largest difference between two sets of parameters, relative to each norm."""
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).norm() / want[name].norm()) for name in want)


@pytest.mark.parametrize(
    ("num_microbatches", "model", "optimizer", "rtol"),
    [(2, SIGMOID, SGD, 1e-6), (1, SMALL, ADAMW, 1e-4)],
    ids=["sgd accumulated, sigmoid", "adamw"],
)
def test_the_curve_does_not_depend_on_the_ranks(
    run_ranks: RunRanks, text: Path, num_microbatches, model, optimizer, rtol
):
    alone = make_config(
        text, model=model, optimizer=optimizer, num_microbatches=4 * num_microbatches
    )
    losses, norms, parameters = _take_steps(0, 1, alone)
    assert losses[-1] < losses[0] - 0.5
    shared = change_training(alone, num_microbatches=num_microbatches)
    for ep_size, tp_size in ((1, 1), (2, 1), (4, 2)):
        spread = dataclasses.replace(shared, ep_size=ep_size, expert_tp_size=tp_size)
        first, *others = run_ranks(_take_steps, 4, spread)
        for got in (first, *others):
            torch.testing.assert_close(got, first, rtol=0, atol=0)
            assert got[0] == pytest.approx(losses, rel=rtol)
            if optimizer is SGD:
                assert got[1] == pytest.approx(norms, rel=1e-5)
                assert _difference(got[2], parameters) < rtol


def test_activation_checkpointing_changes_no_bit(run_ranks: RunRanks, text: Path):
    curves = []
    for on in (False, True):
        config = make_config(text, model=SIGMOID, activation_checkpointing=on, num_microbatches=2)
        curves.append(run_ranks(_take_steps, 2, config, 4))
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=0)


@pytest.fixture
def deterministic_ends() -> Iterator[None]:
    """Restore the process-wide settings of torch after each test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore


@pytest.mark.usefixtures("deterministic_ends")
def test_deterministic_runs_have_the_same_bits(text: Path):
    """A step runs with deterministic algorithms, for which torch raises where there is none."""
    curves = []
    for on in (True, True, False):
        assert torch.are_deterministic_algorithms_enabled() == bool(curves)
        config = make_config(text, model=SIGMOID, deterministic=on)
        curves.append(_take_steps(0, 1, config, 3))
    for other in curves[1:]:
        torch.testing.assert_close(other, curves[0], rtol=0, atol=0)


def _biases(run: TrainingRun) -> list[list[float]]:
    return [router.bias.tolist() for router in run.routers()]


def _follow_biases(rank: int, num_ranks: int, config: RunConfig) -> tuple[list, list]:
    """Return router biases after two steps, and those computed from the loads of all ranks."""
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


@pytest.mark.parametrize("chunk_bytes", [head_loss.CHUNK_BYTES, 7000])
def test_one_step_by_hand(text: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """The loss is the mean over microbatches, and SGD moves by the rate times its gradient.

    The logits of a microbatch have 32 * 256 * 4 bytes: 7000 means chunks of 7 tokens.
    """
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", chunk_bytes)
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


def _summarise_two_orders(rank: int, num_ranks: int) -> dict[str, float]:
    orders = [{"a": 1.0, "b": 2.0}, {"b": 6.0, "a": 3.0}]
    later = [{"a": 5.0, "b": 2.0}, {"b": 6.0, "a": 7.0}]
    last = [{"a": 9.0, "b": 8.0}, {"b": 8.0, "a": 9.0}]
    samples = [orders[rank], later[rank], last[rank]]
    return _summarise(samples, make_world(rank, num_ranks))


def test_parts_are_matched_by_name(run_ranks: RunRanks) -> None:
    """Means over ranks are 2, 6, 9 for a and 4, 4, 8 for b; the results are their medians."""
    assert run_ranks(_summarise_two_orders, 2) == [{"a": 6.0, "b": 4.0}] * 2


def _compare(rank: int, num_ranks: int, config: RunConfig) -> dict[str, dict[str, float]]:
    world, calls = make_world(rank, num_ranks), list[tuple[int, int]]()
    profiles = compare_strategies(
        config,
        ["sequential", "chunked"],
        world,
        num_steps=1,
        on_progress=lambda *n: calls.append(n),
    )
    assert calls == [(done, 8) for done in range(1, 9)]  # 3 of 4 steps of each strategy are warm-up
    for profile in profiles.values():
        assert {span.rank for span in profile.spans} == set(range(num_ranks))
        assert any(span.stream == "comm" for span in profile.spans)
    return {name: profile.parts_us for name, profile in profiles.items()}


def test_parts_add_up_to_the_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(_compare, 2, make_config(write_text(tmp_path), num_steps=3))
    assert first == second
    for parts_us in first.values():
        whole, exposed = parts_us.pop(STEP), parts_us.pop(EXPOSED)
        assert sum(parts_us.values()) == pytest.approx(whole, rel=1e-3)
        waits = sum(us for name, us in parts_us.items() if name.endswith(".wait"))
        assert waits == pytest.approx(exposed, rel=1e-3)
        assert {"attention", "experts", "backward", "dispatch.backward.wait"} <= set(parts_us)
