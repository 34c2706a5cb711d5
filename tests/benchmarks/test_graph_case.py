"""Cases of the graph benchmark: model sizes, shared weights, and rows of the most loaded rank."""

import dataclasses

import pytest
import torch

from benchmarks.graph_bench.case import GraphCase, GraphSubject, check_inner, compare
from benchmarks.graph_bench.gpt2_moe import Gate, GPT2MoE, check_gate, find_shape
from halley.core.timeline import Recorder
from halley.core.types import DROPPED
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.router import AbstractRouter, RouterOutput
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.traceable import TraceableStrategy
from halley.tools.layer_case import relative_error


CPU = torch.device("cpu")


def test_sizes_are_those_of_the_paper() -> None:
    shape, groups = find_shape("gpt2-s-moe"), ParallelGroups(num_ranks=4, ep_size=4)
    strategy = TraceableStrategy(None)
    model = GPT2MoE(shape, "switch", groups, strategy=strategy, device="meta")
    size, inner = 768, 3072
    attention = 3 * size * size + 3 * size + size * size + size
    dense = size * inner + inner + inner * size + size
    experts = 2 * 2 * size * inner + 8 * size  # and a router over those of four ranks
    want = 2 * 50304 * size + 512 * size + 2 * size  # embeddings, head, last norm
    want += 12 * (attention + 4 * size) + 6 * dense + 6 * experts
    assert sum(parameter.numel() for parameter in model.parameters()) == want
    large = find_shape("gpt2-l-moe")
    assert (large.num_layers, large.hidden_size, large.num_heads) == (24, 1024, 16)
    assert shape.hidden_size // shape.num_heads == large.hidden_size // large.num_heads == 64


def _case(gate: Gate) -> GraphCase:
    return GraphCase(
        shape=find_shape("gpt2-tiny-moe"), gate=gate, batch_size=6, dtype=torch.float32
    )


def _differences(rank: int, num_ranks: int, gate: Gate) -> tuple[list[float], bool, float]:
    """Return the errors of the eager model by strategy, whether weights are shared, and a norm."""
    groups = build_groups(0, device_type="cpu")
    subject = GraphSubject(_case(gate), groups, CPU)
    wanted = subject.values(subject.whole)
    errors = []
    for strategy in (
        TraceableStrategy(groups.ep),
        AllToAllStrategy(groups.ep, recorder=Recorder(CPU, enabled=False)),
    ):
        subject.plain.model.use(strategy)
        errors.append(compare(subject.values(subject.plain), wanted).max_rel_err)
    pairs = zip(subject.whole.parameters(), subject.plain.parameters(), strict=True)
    shared = all(one is other for one, other in pairs)
    expert = wanted["model.h.1.moe.experts.down_proj"]
    return errors, shared, expert.norm().item()


@pytest.mark.parametrize("gate", ["switch", "top2", "dropless"])
def test_compiled_and_eager_model_share_weights_and_agree(run_ranks, gate: Gate) -> None:
    for (same, sequential), shared, norm in run_ranks(_differences, 2, gate):
        assert shared
        assert same == 0.0
        assert sequential < 1e-6
        assert norm > 0.0


def _rows(rank: int, num_ranks: int, gate: Gate) -> tuple[int, list[list[int]], int]:
    """Return the reported rows, the rows sent to each rank by layer, and the routed rows."""
    groups, case = build_groups(0, device_type="cpu"), _case(gate)
    subject, given = GraphSubject(case, groups, CPU), []

    def note(_: object, __: object, out: RouterOutput) -> None:
        idx_TK = out.routing.topk_idx_TK
        owners = idx_TK[idx_TK != DROPPED] // case.shape.experts_per_rank
        given.append(owners.bincount(minlength=num_ranks).tolist())

    for module in subject.plain.modules():
        if isinstance(module, AbstractRouter):
            module.register_forward_hook(note)
    return subject.fullest_rows(), given, case.num_slots


@pytest.mark.parametrize("gate", ["switch", "dropless"])
def test_rows_of_the_most_loaded_rank_exclude_dropped_rows(run_ranks, gate: Gate) -> None:
    ranks = run_ranks(_rows, 2, gate)
    layers = zip(*(given for _, given, _ in ranks), strict=True)
    fullest = [max(map(sum, zip(*sent, strict=True))) for sent in layers]
    for told, given, num_slots in ranks:
        assert told == round(sum(fullest) / len(fullest))
        assert (sum(map(sum, given)) < len(fullest) * num_slots) == (gate != "dropless")


def test_values_are_compared_by_name() -> None:
    wanted = {"loss": torch.tensor(2.0), "w": torch.tensor([3.0, 4.0])}
    assert compare(dict(wanted), wanted).names == ()
    found = compare(wanted | {"w": torch.tensor([3.0, 4.5])}, wanted)
    assert found.names == ("w",)
    assert (
        found.max_rel_err
        == pytest.approx(0.1)
        == relative_error(torch.tensor([3.0, 4.5]), wanted["w"])
    )
    with pytest.raises(RuntimeError, match="gradients differ in number"):
        compare({"loss": wanted["loss"]}, wanted)


def test_chunk_counts_are_at_most_the_experts_of_a_rank() -> None:
    case = _case("switch")
    wide = dataclasses.replace(case, shape=dataclasses.replace(case.shape, experts_per_rank=4))
    assert case.settings("chunked") == ["n=2"]
    assert wide.settings("chunked") == ["n=2", "n=3", "n=4"]
    assert case.settings("both") == [""]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, r"batch \(0\) must be at least 1"),
        ({"num_parts": 9}, r"num_parts \(9\) must be 0, or 2 to 8"),
        ({"num_parts": 4}, r"num_parts \(4\) must divide batch \(6\)"),
        ({"memory_margin": -1.0}, r"memory_margin \(-1.0\) must be finite and at least 0"),
    ],
)
def test_wrong_number_in_a_case_is_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_case("switch"), **change)


def test_unknown_name_is_an_error() -> None:
    for check, word in ((find_shape, "model"), (check_gate, "gate"), (check_inner, "inner")):
        with pytest.raises(ValueError, match=rf"{word} \(magic\) must be one of"):
            check("magic")
