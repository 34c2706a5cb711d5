"""Wrong calls of layers, strategies and recorders, and their messages."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import halley
from halley.moe.experts import GroupedExperts
from halley.moe.router import build_router
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategies, predictor_of, split_strategies
from tests.hostile.test_configuration import MODEL, MOE


def any_(value: Any) -> Any:
    """Return a value that a type checker lets pass for any other."""
    return value


RECORDER = halley.Recorder("cpu", enabled=False)
STRATEGY = halley.build_strategy("sequential", None, recorder=RECORDER, device="cpu")
PLAIN = halley.ExpertPlacement.plain(8, num_ranks=1)


def _layer(config: Any = MOE, hidden_size: Any = 64, **changes: Any) -> halley.MoELayer:
    given: dict[str, Any] = {"strategy": STRATEGY} | changes
    return halley.MoELayer(config, hidden_size, **given)


def _strategy(name: Any = "sequential", group: Any = None, **changes: Any) -> object:
    given: dict[str, Any] = {"recorder": RECORDER, "device": "cpu"} | changes
    return halley.build_strategy(name, group, **given)


def _model(config: Any = MODEL, **changes: Any) -> MoETransformer:
    groups = halley.ParallelGroups()
    given: dict[str, Any] = {"strategy": STRATEGY, "groups": groups, "recorder": RECORDER}
    return MoETransformer(config, **(given | changes))


def _router(device: Any) -> object:
    return build_router(MOE, hidden_size=64, dtype=torch.float32, device=device)


def _grouped(**changes: Any) -> GroupedExperts:
    given: dict[str, Any] = {
        "num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "up_size": 64, "bias": False,
        "groups": halley.ParallelGroups(), "dtype": torch.float32, "device": "cpu",
    }  # fmt: skip
    return GroupedExperts(**(given | changes))


# Name of the case: the call, the whole message.
WRONG_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "layer: config of another type": (
        lambda: _layer(config=None),
        "config (None) must be of type MoEConfig",
    ),
    "layer: config is a dict": (
        lambda: _layer(config={"num_experts": 8}),
        "config ({'num_experts': 8}) must be of type MoEConfig",
    ),
    "layer: hidden size is text": (
        lambda: _layer(hidden_size="64"),
        "hidden_size ('64') must be of type int",
    ),
    "layer: hidden size is a fraction": (
        lambda: _layer(hidden_size=64.0),
        "hidden_size (64.0) must be of type int",
    ),
    "layer: hidden size is a boolean": (
        lambda: _layer(hidden_size=True),
        "hidden_size (True) must be of type int",
    ),
    "layer: hidden size is zero": (
        lambda: _layer(hidden_size=0),
        "hidden_size (0) must be at least 1",
    ),
    "layer: hidden size is negative": (
        lambda: _layer(hidden_size=-64),
        "hidden_size (-64) must be at least 1",
    ),
    "layer: hidden size is not aligned": (
        lambda: _layer(hidden_size=65),
        (
            "hidden_size (65) must be a multiple of 4 for torch.float32: torch's grouped "
            "GEMM reads rows of 16 bytes"
        ),
    ),
    "layer: no strategy": (
        lambda: _layer(strategy=None),
        "strategy (None) must be of type AbstractStrategy",
    ),
    "layer: strategy by name": (
        lambda: _layer(strategy="fused"),
        "strategy ('fused') must be of type AbstractStrategy",
    ),
    "layer: groups of another type": (
        lambda: _layer(groups=4),
        "groups (4) must be of type ParallelGroups",
    ),
    "layer: dtype by name": (
        lambda: _layer(dtype="float32"),
        "dtype ('float32') must be of type dtype",
    ),
    "layer: integer dtype": (
        lambda: _layer(dtype=torch.int64),
        "dtype (torch.int64) must be a floating dtype",
    ),
    "layer: unknown device": (
        lambda: _layer(device="gpu"),
        "device ('gpu') must be a device of type cpu or cuda or meta",
    ),
    "layer: device of another kind": (
        lambda: _layer(device="xpu"),
        "device ('xpu') must be one of 'cpu', 'cuda', 'meta'",
    ),
    "layer: device is a number": (
        lambda: _layer(device=0),
        "device (0) must be a torch.device or its name",
    ),
    "layer: device is None": (
        lambda: _layer(device=None),
        "device (None) must be a torch.device or its name",
    ),
    "layer: placement of another type": (
        lambda: _layer(placement=[[0, 1, 2, 3, 4, 5, 6, 7]]),
        "placement ([[0, 1, 2, 3, 4, 5, 6, 7]]) must be of type ExpertPlacement",
    ),
    "layer: placement for other experts": (
        lambda: _layer(placement=halley.ExpertPlacement.plain(4, num_ranks=1)),
        "placement (4 experts) must be for num_experts 8",
    ),
    "layer: placement for more ranks": (
        lambda: _layer(placement=halley.ExpertPlacement.plain(8, num_ranks=2)),
        "placement (2 ranks) must be for ep_size 1",
    ),
    "layer: input of another size": (
        lambda: _layer().forward(torch.zeros(3, 32)),
        "x (3, 32) must be (..., hidden_size) with hidden_size 64",
    ),
    "layer: input without dimensions": (
        lambda: _layer().forward(torch.tensor(1.0)),
        "x () must be (..., hidden_size) with hidden_size 64",
    ),
    "layer: input on another device": (
        lambda: _layer().forward(torch.zeros(3, 64, device="meta")),
        "x device (meta) must be that of the router (cpu)",
    ),
    "layer: input of another dtype": (
        lambda: _layer(dtype=torch.bfloat16).forward(torch.zeros(3, 64)),
        "x dtype (torch.float32) must be that of the experts' weights (torch.bfloat16)",
    ),
    "layer: groups for other shards": (
        lambda: _layer(groups=halley.ParallelGroups(ep_size=2, num_ranks=2, tp_size=2)),
        "strategy's tp_size (1) must be that of groups (2)",
    ),
    "layer: experts do not divide": (
        lambda: _layer(
            replace(MOE, num_experts=7), groups=halley.ParallelGroups(ep_size=2, num_ranks=2)
        ),
        "num_experts (7) must be divisible by ep_size (2)",
    ),
    "strategy: unknown": (
        lambda: _strategy("fastest"),
        (
            "strategy (fastest) must be one of sequential, chunked, gathered, functional, "
            "unfused, fused, auto"
        ),
    ),
    "strategy: empty": (
        lambda: _strategy(""),
        (
            "strategy () must be one of sequential, chunked, gathered, functional, "
            "unfused, fused, auto"
        ),
    ),
    "strategy: None": (lambda: _strategy(None), "strategy (None) must be of type str"),
    "strategy: a class": (lambda: _strategy(str), "strategy (<class 'str'>) must be of type str"),
    "strategy: of two lines": (
        lambda: _strategy("fused\nfused"),
        (
            "strategy ('fused\\nfused') must be one of sequential, chunked, gathered, "
            "functional, unfused, fused, auto"
        ),
    ),
    "strategy: keeps what it cannot": (
        lambda: _strategy("fused:nothing"),
        (
            "strategy (fused:nothing) must be one of sequential, chunked, gathered, "
            "functional, unfused, fused, auto, unfused:all, unfused:inputs, "
            "unfused:recompute, fused:all, fused:inputs, fused:recompute"
        ),
    ),
    "strategy: keeps nothing to choose": (
        lambda: _strategy("sequential:inputs"),
        (
            "strategy (sequential:inputs) must be one of sequential, chunked, gathered, "
            "functional, unfused, fused, auto, unfused:all, unfused:inputs, "
            "unfused:recompute, fused:all, fused:inputs, fused:recompute"
        ),
    ),
    "strategy: group of another type": (
        lambda: _strategy(group=4),
        "group (4) must be of type ProcessGroup",
    ),
    "strategy: no recorder": (
        lambda: _strategy(recorder=None),
        "recorder (None) must be of type Recorder",
    ),
    "strategy: unknown device": (
        lambda: _strategy(device="gpu"),
        "device ('gpu') must be a device of type cpu or cuda",
    ),
    "strategy: device of another kind": (
        lambda: _strategy(device="meta"),
        "device ('meta') must be one of 'cpu', 'cuda'",
    ),
    "strategy: device is a number": (
        lambda: _strategy(device=0),
        "device (0) must be a torch.device or its name",
    ),
    "strategy: shards of no rank": (
        lambda: _strategy(tp_size=0),
        "tp_size (0) must be at least 1 and divide the ranks of the group (1)",
    ),
    "strategy: more shards than ranks": (
        lambda: _strategy(tp_size=2),
        "tp_size (2) must be at least 1 and divide the ranks of the group (1)",
    ),
    "strategy: shards are text": (
        lambda: _strategy(tp_size="1"),
        "tp_size ('1') must be of type int",
    ),
    "strategy: fraction of chunks": (
        lambda: _strategy("chunked", num_chunks=1.5),
        "num_chunks (1.5) must be of type int",
    ),
    "strategy: negative chunks": (
        lambda: _strategy("chunked", num_chunks=-1),
        "num_chunks (-1) must be at least 0",
    ),
    "strategy: load below balance": (
        lambda: _strategy(max_load=0.5),
        "max_load (0.5) must be 0 or at least 1",
    ),
    "strategy: load is text": (
        lambda: _strategy(max_load="2"),
        "max_load ('2') must be of type float",
    ),
    "strategy: load is not finite": (
        lambda: _strategy(max_load=math.inf),
        "max_load (inf) must be finite",
    ),
    "strategy: no time": (lambda: _strategy(timeout_s=0.0), "timeout_s (0.0) must be above 0"),
    "strategy: negative time": (lambda: _strategy(timeout_s=-1), "timeout_s (-1) must be above 0"),
    "strategy: time is not a number": (
        lambda: _strategy(timeout_s=math.nan),
        "timeout_s (nan) must be finite",
    ),
    "strategies: one is unknown": (
        lambda: build_strategies(["sequential", "slow"], None, device="cpu", recorder=RECORDER),
        (
            "strategy (slow) must be one of sequential, chunked, gathered, functional, "
            "unfused, fused, auto"
        ),
    ),
    "strategies: unknown device": (
        lambda: build_strategies(["sequential"], None, device="gpu", recorder=RECORDER),
        "device ('gpu') must be a device of type cpu or cuda",
    ),
    "strategies: by commas, unknown": (
        lambda: split_strategies("fused,slow", num_layers=2),
        (
            "strategy (slow) must be one of sequential, chunked, gathered, functional, "
            "unfused, fused, auto"
        ),
    ),
    "strategies: too few": (
        lambda: split_strategies("fused,auto", num_layers=3),
        "strategy (fused,auto) must be one, or as many as MoE layers (3)",
    ),
    "predictor: unknown device": (
        lambda: predictor_of("gpu"),
        "device ('gpu') must be a device of type cpu or cuda",
    ),
    "recorder: unknown device": (
        lambda: halley.Recorder("gpu"),
        "device ('gpu') must be a device of type cpu or cuda",
    ),
    "recorder: device of another kind": (
        lambda: halley.Recorder("meta"),
        "device ('meta') must be one of 'cpu', 'cuda'",
    ),
    "recorder: device is None": (
        lambda: halley.Recorder(any_(None)),
        "device (None) must be a torch.device or its name",
    ),
    "recorder: rank is text": (
        lambda: halley.Recorder("cpu", rank=any_("0")),
        "rank ('0') must be of type int",
    ),
    "recorder: rank is a boolean": (
        lambda: halley.Recorder("cpu", rank=True),
        "rank (True) must be of type int",
    ),
    "recorder: enabled is a number": (
        lambda: halley.Recorder("cpu", enabled=any_(1)),
        "enabled (1) must be of type bool",
    ),
    "router: unknown device": (
        lambda: _router("gpu"),
        "device ('gpu') must be a device of type cpu or cuda or meta",
    ),
    "router: device is None": (
        lambda: _router(None),
        "device (None) must be a torch.device or its name",
    ),
    "grouped experts: unknown device": (
        lambda: _grouped(device="gpu"),
        "device ('gpu') must be a device of type cpu or cuda or meta",
    ),
    "grouped experts: placement of another type": (
        lambda: _grouped(placement="plain"),
        "placement ('plain') must be of type ExpertPlacement",
    ),
    "model: config of another type": (
        lambda: _model(config="tiny"),
        "config ('tiny') must be of type ModelConfig",
    ),
    "model: unknown device": (
        lambda: _model(device="gpu"),
        "device ('gpu') must be a device of type cpu or cuda or meta",
    ),
    "model: too few strategies": (
        lambda: _model(strategy=[STRATEGY]),
        "strategies (1) must be as many as MoE layers (4)",
    ),
    "model: too few placements": (
        lambda: _model(placements=[PLAIN]),
        "placements (1) must be as many as MoE layers (4)",
    ),
}
