"""Twenty SGD steps on one process with four microbatches equal those on four ranks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from halley.distributed.mesh import ParallelGroups, build_groups, global_norm, sync_gradients
from halley.moe.experts import expert_parameter_names
from halley.moe.router import SigmoidRouter
from halley.moe.transformer import MoETransformer
from halley.tools.tolerance import RELATIVE_TOLERANCE, relative_error
from tests.moe.model_case import MODELS, build_model, destroy, make_tokens


NUM_STEPS = 20
NUM_RANKS = 4
LEARNING_RATE = 0.2
SEQUENTIAL, CHUNKED = {"strategy": "sequential"}, {"strategy": "chunked", "num_chunks": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a run on one rank."""

    losses: torch.Tensor  # of each step, over all ranks' tokens
    norms: torch.Tensor  # of the gradients of each step
    weights: dict[str, torch.Tensor]  # at the end


def train(config_name: str, groups: ParallelGroups, *, ranks: list[int], **case) -> Run:
    """Train on the tokens of ``ranks``, one microbatch each."""
    model = build_model(MODELS[config_name], groups=groups, **case)
    sharded = expert_parameter_names(model)
    losses, norms = torch.zeros(NUM_STEPS), torch.zeros(NUM_STEPS)
    for step in range(NUM_STEPS):
        counts_ME = torch.zeros(2, 8, dtype=torch.int64)
        for rank in ranks:
            tokens_BS = make_tokens(rank, step=step % 4)  # seen again, so that losses fall
            out = model(tokens_BS)
            logits = out.logits_BSV[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, tokens_BS[:, 1:].flatten()) + out.router_loss
            (loss / len(ranks)).backward()
            losses[step] += loss.detach() / NUM_RANKS
            counts_ME += out.counts_ME
        parameters = dict(model.named_parameters())
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        assert grads.keys() == parameters.keys()
        dense = [grad for name, grad in grads.items() if name not in sharded]
        expert = [grad for name, grad in grads.items() if name in sharded]
        sync_gradients(dense, expert, groups=groups)
        norms[step] = global_norm(dense, expert, groups=groups)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= LEARNING_RATE * grads[name]
                parameter.grad = None
        if groups.world is not None:
            torch.distributed.all_reduce(counts_ME, group=groups.world)
        _update_biases(model, counts_ME)
    if groups.world is not None:
        torch.distributed.all_reduce(losses, group=groups.world)
    return Run(losses=losses, norms=norms, weights=model.state_dict())


def _update_biases(model: MoETransformer, counts_ME: torch.Tensor) -> None:
    routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
    for router, counts_E in zip(routers, counts_ME, strict=bool(routers)):
        router.update_bias(counts_E)


def _train_on_ranks(rank: int, num_ranks: int, config_name: str, ep_size: int, case: dict) -> Run:
    groups = build_groups(ep_size, device_type="cpu")
    run = train(config_name, groups, ranks=[rank], **case)
    destroy(groups)
    return run


def _join(runs: list[Run], sharded: set[str]) -> dict[str, torch.Tensor]:
    """Return unsharded weights from the ranks of one expert-parallel group."""
    names = runs[0].weights
    return {
        name: torch.cat([run.weights[name] for run in runs]) if name in sharded else names[name]
        for name in names
    }


@pytest.mark.parametrize(
    ("kind", "by_ep_size"),
    [
        ("softmax", (SEQUENTIAL, CHUNKED, SEQUENTIAL)),
        ("sigmoid", (CHUNKED, SEQUENTIAL, CHUNKED)),
        ("switch", (SEQUENTIAL, SEQUENTIAL, CHUNKED)),
        ("top2", (CHUNKED, CHUNKED, SEQUENTIAL)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_ep_size_trains_alike(run_ranks, kind: str, by_ep_size: tuple[dict, ...]) -> None:
    start = build_model(MODELS[kind])
    sharded, tolerance = expert_parameter_names(start), RELATIVE_TOLERANCE[torch.float32]
    want = train(kind, ParallelGroups(), ranks=list(range(NUM_RANKS)))
    # The run must have gone somewhere, or all layouts would agree for nothing.
    assert want.losses[-4:].mean() < want.losses[:4].mean() - 0.1
    for name, weight in start.state_dict().items():
        assert relative_error(want.weights[name], weight) > 1e-3

    for ep_size, case in zip((1, 2, 4), by_ep_size, strict=True):
        runs: list[Run] = run_ranks(_train_on_ranks, NUM_RANKS, kind, ep_size, case)
        for first in range(0, NUM_RANKS, ep_size):
            weights = _join(runs[first : first + ep_size], sharded)
            for name, weight in want.weights.items():
                assert relative_error(weights[name], weight) <= tolerance, name
        for run in runs:
            assert relative_error(run.losses, want.losses) <= tolerance
            assert relative_error(run.norms, want.norms) <= tolerance
            for name in want.weights.keys() - sharded:  # copies stay copies, bit for bit
                assert torch.equal(run.weights[name], runs[0].weights[name]), name
