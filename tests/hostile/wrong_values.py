"""Wrong groups, placements, plans, routing and measurements, and their messages."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import halley
from halley.core.reference import activate
from halley.core.routing import chunk_sizes, local_experts, sort_slots
from halley.core.sharding import check_tp_size
from halley.core.timeline import write_chrome_trace
from halley.core.types import Experts, LayerShape
from halley.cost.graph_cost import Operation
from halley.cost.profiles import Curve, Environment
from halley.cost.simulate import Contention
from halley.planner.expert_balance import plan_placement
from halley.tools.skew import parse_load


def any_(value: Any) -> Any:
    """Return a value that a type checker lets pass for any other."""
    return value


def _experts(activation: Any) -> Experts:
    weight = torch.zeros(1, 4, 4)
    return Experts(up_LGD=weight, down_LDF=weight, activation=activation)


def _placement(*experts_WL: Any, num_experts: Any = 2) -> halley.ExpertPlacement:
    return halley.ExpertPlacement(num_experts=num_experts, experts_WL=experts_WL)


def _shape(activation: Any) -> LayerShape:
    sizes = {"num_tokens": 1, "hidden_size": 4, "intermediate_size": 4, "num_experts": 2}
    return LayerShape(**sizes, top_k=1, ep_size=1, activation=activation)


# Name of the case: the call, the whole message.
WRONG_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "trace: no such folder": (
        lambda: write_chrome_trace([], "/nothere/trace.json"),
        "trace (/nothere/trace.json) must be a file to write: No such file or directory",
    ),
    "trace: no such folder, compressed": (
        lambda: write_chrome_trace([], Path("/nothere/trace.json.gz")),
        ("trace (/nothere/trace.json.gz) must be a file to write: No such file or directory"),
    ),
    "trace: a folder": (
        lambda: write_chrome_trace([], "/"),
        "trace (/) must be a file to write: Is a directory",
    ),
    "groups: negative size": (
        lambda: halley.build_groups(-1, device_type="cpu"),
        "ep_size (-1) must be at least 0",
    ),
    "groups: size is a fraction": (
        lambda: halley.build_groups(any_(1.0), device_type="cpu"),
        "ep_size (1.0) must be of type int",
    ),
    "groups: size is a boolean": (
        lambda: halley.build_groups(True, device_type="cpu"),
        "ep_size (True) must be of type int",
    ),
    "groups: more than ranks": (
        lambda: halley.build_groups(2, device_type="cpu"),
        "ep_size (2) must divide the number of ranks (1)",
    ),
    "groups: unknown device": (
        lambda: halley.build_groups(1, device_type="gpu"),
        "device_type ('gpu') must be one of 'cpu', 'cuda'",
    ),
    "groups: device of another kind": (
        lambda: halley.build_groups(1, device_type=any_(torch.device("cpu"))),
        "device_type (device(type='cpu')) must be one of 'cpu', 'cuda'",
    ),
    "groups: no shards": (
        lambda: halley.build_groups(1, device_type="cpu", tp_size=0),
        "tp_size (0) must be at least 1 and divide the ranks of the group (1)",
    ),
    "groups: too many shards": (
        lambda: halley.build_groups(1, device_type="cpu", tp_size=2),
        "tp_size (2) must be at least 1 and divide the ranks of the group (1)",
    ),
    "groups: shards are text": (
        lambda: halley.build_groups(1, device_type="cpu", tp_size=any_("1")),
        "tp_size ('1') must be of type int",
    ),
    "parallel groups: no rank": (
        lambda: halley.ParallelGroups(ep_size=0),
        "ep_size (0) must be at least 1",
    ),
    "parallel groups: negative shards": (
        lambda: halley.ParallelGroups(tp_size=-1),
        "tp_size (-1) must be at least 1",
    ),
    "parallel groups: shards do not divide": (
        lambda: halley.ParallelGroups(ep_size=3, num_ranks=3, tp_size=2),
        "tp_size (2) must be at least 1 and divide the ranks of the group (3)",
    ),
    "parallel groups: rank too large": (
        lambda: halley.ParallelGroups(rank=1),
        "rank (1) must be between 0 and 0",
    ),
    "parallel groups: rank of experts too large": (
        lambda: halley.ParallelGroups(ep_rank=2, ep_size=2, num_ranks=2),
        "ep_rank (2) must be between 0 and 1",
    ),
    "parallel groups: size is text": (
        lambda: halley.ParallelGroups(ep_size=any_("2")),
        "ep_size ('2') must be of type int",
    ),
    "gradients: no groups": (
        lambda: halley.sync_gradients([], [], groups=any_(None)),
        "groups (None) must be of type ParallelGroups",
    ),
    "placement: no ranks": (
        lambda: _placement(),
        "placement (empty) must have at least one rank and one expert on it",
    ),
    "placement: no experts on a rank": (
        lambda: _placement((), ()),
        "placement (empty) must have at least one rank and one expert on it",
    ),
    "placement: a list": (
        lambda: halley.ExpertPlacement(num_experts=1, experts_WL=any_([[0]])),
        "experts_WL ([[0]]) must be of type tuple",
    ),
    "placement: lists of a tuple": (
        lambda: _placement([0], [1]),
        "experts_WL[0] ([0]) must be of type tuple",
    ),
    "placement: expert is text": (
        lambda: _placement(("0",), ("1",)),
        "experts_WL[0][0] ('0') must be of type int",
    ),
    "placement: expert is a boolean": (
        lambda: _placement((0,), (True,)),
        "experts_WL[1][0] (True) must be of type int",
    ),
    "placement: expert is a fraction": (
        lambda: _placement((0,), (1.0,)),
        "experts_WL[1][0] (1.0) must be of type int",
    ),
    "placement: different numbers": (
        lambda: _placement((0, 1), (1,)),
        "placement of rank 1 ([1]) must have 2 experts, as that of rank 0",
    ),
    "placement: twice on a rank": (
        lambda: _placement((0, 0), (0, 1)),
        "placement of rank 0 ([0, 0]) must be ascending, no expert twice",
    ),
    "placement: descending": (
        lambda: _placement((1, 0), (0, 1)),
        "placement of rank 0 ([1, 0]) must be ascending, no expert twice",
    ),
    "placement: below zero": (
        lambda: _placement((-1,), (1,)),
        "placement of rank 0 ([-1]) must have experts below num_experts (2)",
    ),
    "placement: beyond the last": (
        lambda: _placement((0,), (2,)),
        "placement of rank 1 ([2]) must have experts below num_experts (2)",
    ),
    "placement: one is nowhere": (
        lambda: _placement((0,), (0,)),
        "placement must hold every expert: 1 is on no rank",
    ),
    "placement: number is text": (
        lambda: _placement((0,), (1,), num_experts="2"),
        "num_experts ('2') must be of type int",
    ),
    "placement: no experts": (
        lambda: _placement((0,), num_experts=0),
        "num_experts (0) must be between 1 and 32767",
    ),
    "placement: too many experts": (
        lambda: _placement((0,), num_experts=10**12),
        "num_experts (1000000000000) must be between 1 and 32767",
    ),
    "placement: too many replicas": (
        lambda: _placement(*(tuple(range(256)),) * 128, num_experts=256),
        (
            "placement (128 ranks of 256 experts) must have at most 32767 experts on all "
            "ranks together"
        ),
    ),
    "plain placement: too many experts": (
        lambda: halley.ExpertPlacement.plain(10**12, num_ranks=1),
        "num_experts (1000000000000) must be between 1 and 32767",
    ),
    "plain placement: number is text": (
        lambda: halley.ExpertPlacement.plain(any_("8"), num_ranks=1),
        "num_experts ('8') must be of type int",
    ),
    "plain placement: no ranks": (
        lambda: halley.ExpertPlacement.plain(8, num_ranks=0),
        "ep_size (0) must be at least 1",
    ),
    "plain placement: ranks do not divide": (
        lambda: halley.ExpertPlacement.plain(8, num_ranks=3),
        "num_experts (8) must be divisible by ep_size (3)",
    ),
    "plain placement: ranks are a fraction": (
        lambda: halley.ExpertPlacement.plain(8, num_ranks=any_(2.0)),
        "num_ranks (2.0) must be of type int",
    ),
    "plan: no ranks": (
        lambda: plan_placement([1, 2], num_ranks=0, spare=0),
        "ranks (0) must be at least 1",
    ),
    "plan: too many ranks": (
        lambda: plan_placement([1, 2], num_ranks=10**9, spare=0),
        "ranks (1000000000) must be at most 32767",
    ),
    "plan: negative spare": (
        lambda: plan_placement([1, 2], num_ranks=2, spare=-1),
        "spare (-1) must be at least 0",
    ),
    "plan: spare beyond all": (
        lambda: plan_placement([1, 2], num_ranks=2, spare=2),
        "spare (2) must leave a rank at most all experts (2), and it has 1 without",
    ),
    "plan: negative count": (
        lambda: plan_placement([1, -2], num_ranks=2, spare=0),
        "counts ([1, -2]) must be at least 0 and not all 0",
    ),
    "plan: no count": (
        lambda: plan_placement([0, 0], num_ranks=2, spare=0),
        "counts ([0, 0]) must be at least 0 and not all 0",
    ),
    "plan: count is not a number": (
        lambda: plan_placement([1, math.nan], num_ranks=2, spare=0),
        "counts ([1, nan]) must be at least 0 and not all 0",
    ),
    "experts: unknown activation": (
        lambda: _experts("relu"),
        "activation ('relu') must be one of 'swiglu', 'gelu'",
    ),
    "experts: no activation": (
        lambda: _experts(None),
        "activation (None) must be one of 'swiglu', 'gelu'",
    ),
    "activation: unknown": (
        lambda: activate(torch.zeros(1, 2), any_("relu")),
        "activation ('relu') must be one of 'swiglu', 'gelu'",
    ),
    "shape: unknown activation": (
        lambda: _shape("relu"),
        "activation ('relu') must be one of 'swiglu', 'gelu'",
    ),
    "operation: unknown role": (
        lambda: Operation(name="a", role=any_("sleep"), duration_us=1.0),
        "role ('sleep') must be one of 'compute', 'start', 'wait', 'free'",
    ),
    "routing: no chunks": (
        lambda: chunk_sizes(4, 0),
        "num_chunks (0) must be between 1 and num_local_experts (4)",
    ),
    "routing: more chunks than experts": (
        lambda: chunk_sizes(4, 5),
        "num_chunks (5) must be between 1 and num_local_experts (4)",
    ),
    "routing: no ranks": (lambda: local_experts(8, ep_size=0), "ep_size (0) must be at least 1"),
    "routing: shards do not divide": (
        lambda: local_experts(8, ep_size=4, tp_size=3),
        "tp_size (3) must divide ep_size (4)",
    ),
    "routing: too many experts to sort": (
        lambda: sort_slots(torch.zeros(1, 1, dtype=torch.int64), 32768),
        "num_experts (32768), shards and replicas included, must be at most 32767",
    ),
    "sharding: no ranks": (
        lambda: check_tp_size(0, num_ranks=4),
        "tp_size (0) must be at least 1 and divide the ranks of the group (4)",
    ),
    "skew: unknown": (
        lambda: parse_load("random", num_experts=8, top_k=2),
        "skew (random) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot",
    ),
    "skew: no number": (
        lambda: parse_load("zipf:", num_experts=8, top_k=2),
        "skew (zipf:) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot",
    ),
    "skew: not finite": (
        lambda: parse_load("std:nan", num_experts=8, top_k=2),
        "skew (std:nan) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot",
    ),
    "skew: too large": (
        lambda: parse_load("std:0.9", num_experts=8, top_k=2),
        "std (0.9) must be between 0 and 0.0818 for num_experts 8 and top_k 2",
    ),
    "skew: negative": (
        lambda: parse_load("zipf:-1", num_experts=8, top_k=2),
        "exponent (-1.0) must be at least 0",
    ),
    "skew: more choices than experts": (
        lambda: parse_load("zipf:1", num_experts=2, top_k=3),
        "top_k (3) must be between 1 and num_experts (2)",
    ),
    "skew: no experts": (
        lambda: parse_load("balanced", num_experts=0, top_k=1),
        "top_k (1) must be between 1 and num_experts (0)",
    ),
    "contention: below one": (lambda: Contention(compute=0.5), "compute (0.5) must be at least 1"),
    "contention: is text": (lambda: Contention(comm=any_("2")), "comm ('2') must be of type float"),
    "contention: negative margin": (
        lambda: Contention(sm_margin=-1),
        "sm_margin (-1) must be at least 0",
    ),
    "contention: is not a number": (lambda: Contention(comm=math.nan), "comm (nan) must be finite"),
    "curve: no points": (
        lambda: Curve(()),
        "points' bytes ([]) must be positive, distinct and ascending",
    ),
    "curve: not ascending": (
        lambda: Curve(((2, 1.0), (1, 1.0))),
        "points' bytes ([2, 1]) must be positive, distinct and ascending",
    ),
    "curve: no bytes": (
        lambda: Curve(((0, 1.0),)),
        "points' bytes ([0]) must be positive, distinct and ascending",
    ),
    "curve: no time": (lambda: Curve(((1, 0.0),)), "points' microseconds (0.0) must be above 0"),
    "curve: points are lists": (
        lambda: Curve(any_([[1, 1.0]])),
        "points ([[1, 1.0]]) must be of type tuple",
    ),
    "environment: device is a torch.device": (
        lambda: Environment(device=any_(torch.device("cpu")), versions=""),
        "device (device(type='cpu')) must be of type str",
    ),
}
