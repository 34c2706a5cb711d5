"""Strategy across nodes: values of the reference, rows on the network, and wrong meshes."""

import math
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Experts, Routing
from halley.distributed.nodes import find_nodes
from halley.ops.exchange import Exchange
from halley.ops.wire import WireDtype
from halley.strategies.hierarchical import HierarchicalStrategy
from halley.strategies.part_orders import PIPELINES, SPLIT, Pipeline
from halley.strategies.registry import build_strategy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    CPU,
    SIZES,
    LayerCase,
    assert_same,
    check_values,
    local_experts_of,
    make_tokens,
    run_forward,
    train,
)


def _build(
    inner: str, *, ranks_per_node: int, tp_size: int = 1, pipeline: Pipeline = SPLIT, **options: Any
) -> HierarchicalStrategy:
    group, recorder = dist.group.WORLD, Recorder(CPU, enabled=False)
    nodes = find_nodes(group, ranks_per_node=ranks_per_node)
    strategy = build_strategy(inner, nodes.local, recorder=recorder, device=CPU, tp_size=tp_size)
    return HierarchicalStrategy(
        group, nodes=nodes, inner=strategy, recorder=recorder, pipeline=pipeline, **options
    )


def _check(
    rank: int, num_ranks: int, cases: list[LayerCase], inner: str, ranks_per_node: int
) -> None:
    pipelines = PIPELINES if inner == "sequential" else PIPELINES[3:4]  # most parts
    options: Any = {"ranks_per_node": ranks_per_node, "tp_size": cases[0].tp_size}
    strategies = [_build(inner, pipeline=pipeline, **options) for pipeline in pipelines]
    for index, case in enumerate(cases):
        for strategy in strategies[index % 3 :: 3] or strategies:  # two of six orders
            got = train(strategy.forward, case, rank)
            check_values(got, case, rank)
            assert_same(train(strategy.forward, case, rank), got, f"second run: {case}")


UNEVEN = LayerCase(num_tokens_W=(9, 5, 14, 0), num_experts=16)
CASES = [
    *(replace(UNEVEN, top_k=top_k) for top_k in (1, 2, 8)),
    replace(UNEVEN, top_k=8, skew="zipf:1.5", dropped=0.3),
    replace(UNEVEN, dropped=1.0),
    replace(UNEVEN, skew="one-hot", top_k=1),  # one node gets all tokens
    replace(UNEVEN, skew="empty-expert", bias=True, activation="gelu"),
    replace(UNEVEN, num_tokens_W=(0, 0, 0, 0)),
    replace(UNEVEN, num_tokens_W=(0, 0, 30, 0)),
    replace(UNEVEN, dtype=torch.bfloat16, top_k=4),
]


MESHES = [(2, 1), (4, 2), (3, 1), (2, 2)]  # number of ranks, and of ranks of a node


@pytest.mark.parametrize(
    ("inner", "num_ranks", "ranks_per_node"),
    [
        *(("sequential", *mesh) for mesh in (*MESHES, (4, 1))),
        *(("fused", *mesh) for mesh in MESHES),
    ],
)
def test_values_equal_the_reference_and_repeat(
    run_ranks: RunRanks, inner: str, num_ranks: int, ranks_per_node: int
) -> None:
    cases = [
        replace(case, num_tokens_W=case.num_tokens_W[:num_ranks], num_experts=4 * num_ranks)
        for case in CASES
    ]
    if inner == "fused":  # interpreted kernels are slow: one case with few experts on each mesh
        top_k = 8 if num_ranks == 4 else 3
        case = cases[1] if num_ranks == 2 else replace(cases[3], top_k=top_k)
        cases = [replace(case, num_experts=2 * num_ranks)]
    run_ranks(_check, num_ranks, cases, inner, ranks_per_node)


FEWER_EXPERTS = LayerCase(num_tokens_W=(9, 5), num_experts=4, top_k=3, dropped=0.2)
SHARED = LayerCase(num_tokens_W=(9, 5, 0, 7), tp_size=2, top_k=3, skew="zipf:1.2", dropped=0.2)


@pytest.mark.parametrize(
    ("case", "ranks_per_node"),
    [(FEWER_EXPERTS, 1), (SHARED, 2)],
    ids=["fewer experts in a node than choices", "ranks of a node share experts"],
)
def test_values_of_other_layers(run_ranks: RunRanks, case: LayerCase, ranks_per_node: int) -> None:
    run_ranks(_check, len(case.num_tokens_W), [case], "sequential", ranks_per_node)


def _check_fixed(rank: int, num_ranks: int, cases: list[LayerCase], ranks_per_node: int) -> None:
    options: Any = {"ranks_per_node": ranks_per_node, "max_load": 1.1}
    for index, case in enumerate(cases):
        fewer = replace(case, num_tokens_W=tuple(count // 2 for count in case.num_tokens_W))
        for pipeline in PIPELINES[index % 3 :: 3]:  # two of six orders
            strategy = _build("sequential", pipeline=pipeline, **options)
            for each in (case, fewer):
                check_values(train(strategy.forward, each, rank), each, rank)
    most = max(cases[-1].num_tokens_W)
    more = replace(cases[-1], num_tokens_W=(most + 1,) * num_ranks)
    with pytest.raises(ValueError, match=rf"num_tokens \({most + 1}\) must be at most {most}, the"):
        train(strategy.forward, more, rank)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (4, 2), (3, 1)])
def test_fixed_sizes_give_the_same_values_and_limit_the_tokens(
    run_ranks: RunRanks, num_ranks: int, ranks_per_node: int
) -> None:
    """With 14 tokens a message has a row for each token, with 300 it has fewer rows."""
    case = LayerCase(num_tokens_W=(9, 14, 5, 0)[:num_ranks], num_experts=4 * num_ranks, top_k=2)
    many = replace(case, num_tokens_W=(300, 120, 0, 9)[:num_ranks], dropped=0.1)
    cases = [case, replace(case, top_k=4, dropped=0.3), many]
    run_ranks(_check_fixed, num_ranks, cases, ranks_per_node)


def _cross_too_often(rank: int, num_ranks: int) -> int:
    """Let balanced tokens cross, then all tokens; return how many balanced ones were sent."""
    strategy = _build("sequential", ranks_per_node=1, max_load=1.1, pipeline=PIPELINES[0])
    case = LayerCase(num_tokens_W=(1000, 1000))
    run_forward(strategy.forward, case, rank)
    num_bytes = strategy.recorder.sent_bytes
    x_TD, routing, _ = make_tokens(case, rank)
    elsewhere = Routing(
        topk_idx_TK=torch.tensor([[4, 5]]).expand(1000, 2) - 4 * rank,
        topk_weights_TK=routing.topk_weights_TK,
    )
    own = local_experts_of(case, rank)
    with pytest.raises(
        RuntimeError, match="more tokens have experts in another node than max_load"
    ):
        strategy.forward(x_TD, elsewhere, own)
    return num_bytes


def test_max_load_bounds_the_rows_that_cross(run_ranks: RunRanks) -> None:
    """With top 2 of 8 experts, 22/28 of 1000 tokens cross; a message has 1.1 times as many rows.

    A row is sent as 24 columns of 4 bytes, 2 weights and 2 ids, and its sum returns.
    """
    rows = math.ceil(1.1 * 1000 * 22 / 28)
    assert run_ranks(_cross_too_often, 2) == [rows * (2 * 24 * 4 + 2 * 2 * 4)] * 2


def _differ(rank: int, num_ranks: int) -> None:
    """Give the ranks messages of different sizes, which would abort gloo."""
    strategy = _build("sequential", ranks_per_node=1)
    with pytest.raises(ValueError, match=r"top_k \(2 on rank 0, 3 on rank 1\) must be the same"):
        run_forward(strategy.forward, LayerCase(num_tokens_W=(9, 5), top_k=2 + rank), rank)
    strategy = _build("sequential", ranks_per_node=1, wire_dtype=("", "float8")[rank])
    with pytest.raises(ValueError, match=r"wire_dtype \(.* on rank 0, .* on rank 1\) must be"):
        run_forward(strategy.forward, LayerCase(num_tokens_W=(9, 5)), rank)


def test_ranks_with_other_messages_are_an_error_on_all(run_ranks: RunRanks) -> None:
    run_ranks(_differ, 2)


def _count_rows(rank: int, num_ranks: int, case: LayerCase, ranks_per_node: int) -> None:
    """Compare the rows that leave this rank with the distinct (token, node) pairs."""
    strategy = _build("sequential", ranks_per_node=ranks_per_node)
    sent: dict[tuple[str, bool], int] = {}
    launch = Exchange.launch

    def counted(exchange: Exchange, rows: torch.Tensor, *, backward: bool) -> torch.Tensor:
        if exchange.group is strategy.group and "routing" not in exchange.name:
            key = (exchange.name, backward)
            sent[key] = sent.get(key, 0) + rows.shape[0]
        return launch(exchange, rows, backward=backward)

    with mock.patch.object(Exchange, "launch", counted):
        train(strategy.forward, case, rank)
    per_node = case.num_experts * ranks_per_node // num_ranks

    def count_pairs(sender: int, node: int) -> int:
        idx_TK = make_tokens(case, sender)[1].topk_idx_TK
        here_TK = (idx_TK != DROPPED) & (idx_TK // per_node == node)
        return int(here_TK.any(1).sum())

    own = strategy.nodes.node
    peers = list(range(strategy.nodes.local_rank, num_ranks, ranks_per_node))
    out = sum(count_pairs(rank, n) for n in range(len(peers)) if n != own)
    arrived = sum(count_pairs(peer, own) for peer in peers if peer != rank)
    forward = {("dispatch", False): out, ("combine", False): arrived}
    assert sent == forward | {("combine", True): out, ("dispatch", True): arrived}
    assert out > 0 or not case.num_tokens_W[rank]
    if ranks_per_node == 1:  # else the exchanges inside the node are counted too
        row_bytes, slot_bytes = SIZES["hidden_size"] * case.dtype.itemsize, 4 * case.top_k
        rows_bytes = 2 * (out + arrived) * row_bytes
        words_bytes = out * 2 * slot_bytes + arrived * slot_bytes  # weights and ids; gradients
        assert strategy.recorder.sent_bytes == rows_bytes + words_bytes


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (4, 2), (4, 1)])
def test_a_token_crosses_once_to_each_node(
    run_ranks: RunRanks, num_ranks: int, ranks_per_node: int
) -> None:
    case = replace(UNEVEN, num_tokens_W=UNEVEN.num_tokens_W[:num_ranks], top_k=4, dropped=0.2)
    run_ranks(_count_rows, num_ranks, case, ranks_per_node)


def _find_by_host(rank: int, num_ranks: int, hosts: str, message: str) -> None:
    with mock.patch.dict("os.environ", {"NCCL_HOSTID": hosts[rank]}):
        if message:
            with pytest.raises(ValueError, match=message):
                find_nodes(dist.group.WORLD)
            return
        nodes = find_nodes(dist.group.WORLD)
    names = sorted(set(hosts))
    assert (nodes.node, nodes.num_nodes) == (names.index(hosts[rank]), len(names))
    assert nodes.ranks_per_node == num_ranks // len(names)
    assert (nodes.local is None) == (len(names) == 4)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("aabb", ""),
        ("abcd", ""),
        ("aaaa", ""),
        ("aaab", "hosts must have the same number of ranks of the group: 3 on a, 1 on b"),
        ("abab", "ranks of one host must follow each other in the group: a, b, a, b"),
    ],
)
def test_nodes_are_the_hosts_of_the_ranks(run_ranks: RunRanks, hosts: str, message: str) -> None:
    run_ranks(_find_by_host, 4, hosts, message)


def _give_wrong_size(rank: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node \(3\) must divide .* \(4\)"):
        find_nodes(dist.group.WORLD, ranks_per_node=3)


def test_a_mesh_that_does_not_divide_is_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    run_ranks(_give_wrong_size, 4)


def _compare_wires(rank: int, num_ranks: int, hidden_size: int, num_tokens_W: list[int]) -> None:
    """Compare output and gradients of both wires; all experts of a token are in the other node."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = num_tokens_W[rank]
    x_TD = torch.randn(num_tokens, hidden_size, generator=generator)
    idx_TK = torch.rand(num_tokens, 4, generator=generator).argsort(1)[:, :2] + 4 * (1 - rank)
    weights_TK = torch.rand(num_tokens, 2, generator=generator)
    up = torch.randn(4, 64, hidden_size, generator=generator) * hidden_size**-0.5
    down = torch.randn(4, hidden_size, 32, generator=generator) * 32**-0.5
    grad_TD = torch.randn(num_tokens, hidden_size, generator=generator)

    def run(strategy: HierarchicalStrategy) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x_TD, weights_TK, up, down)]
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=leaves[1])
        y_TD = strategy.forward(leaves[0], routing, Experts(up_LGD=leaves[2], down_LDF=leaves[3]))
        y_TD.backward(grad_TD)
        return [y_TD.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    plain = _build("sequential", ranks_per_node=1)
    float8 = _build("sequential", ranks_per_node=1, wire_dtype="float8")
    least_db = {"y": 28.0, "x.grad": 26.0, "weights.grad": 25.0, "up.grad": 25.0, "down.grad": 25.0}
    for name, want, got in zip(least_db, run(plain), run(float8), strict=True):
        if not want.any():  # no tokens, or no token for the experts of this rank
            assert not got.any()
            continue
        noise = (got - want).square().sum() / want.square().sum()
        assert 0 < noise < 10 ** (-least_db[name] / 10), f"{name}: {-10 * noise.log10():.1f} dB"


@pytest.mark.parametrize(
    ("hidden_size", "num_tokens_W"),
    [(256, [64, 64]), (200, [64, 0])],  # 200 columns have two groups, one padded
)
def test_tokens_in_8_bits_lose_little_accuracy(
    run_ranks: RunRanks, hidden_size: int, num_tokens_W: list[int]
) -> None:
    run_ranks(_compare_wires, 2, hidden_size, num_tokens_W)


def test_unknown_wire_dtype_is_an_error() -> None:
    recorder, wire_dtype = Recorder(CPU, enabled=False), cast(WireDtype, "fp4")
    inner = build_strategy("sequential", None, recorder=recorder, device=CPU)
    parts: Any = {"nodes": find_nodes(None), "inner": inner, "recorder": recorder}
    with pytest.raises(ValueError, match=r"wire_dtype \('fp4'\) must be one of '', 'float8'"):
        HierarchicalStrategy(None, wire_dtype=wire_dtype, **parts)
