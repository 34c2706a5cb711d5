"""Predict a model's step time: trace its graphs in one process and run the compiler passes."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch._dynamo
import torch._dynamo.config
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from halley.compiler import Backend, OrderReport
from halley.compiler.graph_analysis import without_values
from halley.compiler.options import parse_options
from halley.core.config import RunConfig, num_even_rows
from halley.core.timeline import Recorder
from halley.core.types import DTYPES, Experts, LayerShape, Routing, Task
from halley.cost.hardware import CPU, Hardware, Predictor
from halley.cost.profiles import shipped_path
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.fused.op import fused_experts
from halley.fused.passes import LayerCall
from halley.moe.transformer import MoETransformer
from halley.strategies.base import AbstractStrategy
from halley.strategies.traceable import TraceableStrategy


def plan_graphs(
    config: RunConfig,
    *,
    passes: str,
    num_ranks: int,
    hardware: Hardware,
    memory_margin: float = 0.02,
    strategies: Sequence[str] = (),
    profiles: str | Path = "",
    fill: bool = False,
) -> list[OrderReport]:
    """Return predicted times and memory of a run's forward graph, then of its backward graph.

    The model is traced with fake tensors in a fake process group, with a balanced load. With
    passes and a GPU as ``hardware``, the predicted times are those of code that Inductor compiles.
    Otherwise, they are those of eager operators.

    Args:
        passes, memory_margin, hardware: as in ``halley.compiler.options``.
        strategies: "functional", "unfused" or "fused" of each MoE layer; empty: all functional.
        profiles: file of times measured on ``hardware``; "" uses the table of the package, if any.
        fill: measure operators that ``profiles`` lacks, on this machine's GPU.
    """
    options: dict[str, Any] = {
        "passes": passes,
        "inner": "eager" if passes == "none" or hardware.name == CPU.name else "inductor",
        "agree": False,
        "hardware": hardware,
        "memory_margin": memory_margin,
        "unknown_size": num_even_rows(config),
        "profiles": profiles or shipped_path(hardware.name) or "",
        "measure": fill,
    }
    parse_options(options)  # check before the trace: Dynamo wraps errors in its own exception
    backend, device = Backend(plans_only=True), torch.device("cuda" if fill else "cpu")
    with contextlib.ExitStack() as stack:
        # Ignore warnings of torch about its tracing.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(_alone(num_ranks))
        groups = build_groups(config.ep_size, device_type="cpu", tp_size=config.expert_tp_size)
        stack.enter_context(without_values())
        stack.enter_context(torch._dynamo.config.patch(capture_scalar_outputs=True))
        names = strategies or ("functional",) * config.model.num_moe_layers
        place = {"groups": groups, "device": device}
        traceable = {
            name: TraceableStrategy(groups.ep, tp_size=groups.tp_size, deduplicated=deduplicated)
            for name, deduplicated in (("functional", False), ("functional:deduplicated", True))
        }
        layers = [traceable.get(name) or _FusedOperators(name, **place) for name in names]
        _, step = compile_step(config, layers, backend=backend, options=options, **place)
        shape = (config.train.batch_size, config.data.seq_len)
        step(torch.zeros(shape, dtype=torch.int64, device=device))
    return backend.reports


def compile_step(
    config: RunConfig,
    strategies: Sequence[AbstractStrategy],
    *,
    groups: ParallelGroups,
    device: torch.device,
    backend: Backend,
    options: dict[str, Any],
) -> tuple[MoETransformer, Callable[[torch.Tensor], None]]:
    """Return a run's model, and a function that runs its compiled forward and backward.

    Weights have no values yet. The function takes tokens (B, S). It compiles when first called.
    """
    recorder, dtype = Recorder("cpu", enabled=False), DTYPES[config.train.dtype]
    place = {"groups": groups, "device": device, "recorder": recorder}
    model = MoETransformer(config.model, strategy=strategies, dtype=dtype, **place)
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)

    def step(tokens_BS: torch.Tensor) -> None:
        output = compiled(tokens_BS)
        (output.logits_BSV.float().sum() + output.router_loss).backward()

    return model, step


@contextlib.contextmanager
def _alone(num_ranks: int) -> Iterator[None]:
    """In the ``with`` block, make this process rank 0 of a fake group of ``num_ranks`` ranks."""
    if dist.is_initialized():
        raise RuntimeError("a plan is made by one process: this one is a rank of several")
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


@final
class _FusedOperators(AbstractStrategy):
    """Strategy fused or unfused for tracing only: calls the fused operator without real buffers."""

    def __init__(self, name: str, *, groups: ParallelGroups, device: torch.device) -> None:
        kind, _, save = name.partition(":")
        options: dict[str, Any] = {"fused": kind == "fused", "save": save or "all"}
        self.tp_size = groups.tp_size
        self._fused_experts, self._make_call = fused_experts, partial(LayerCall, **options)
        self._ordering_token = torch.zeros(1, dtype=torch.int32, device=device)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
        up_LGD, down_LDF, gated = experts.up_LGD, experts.down_LDF, experts.activation == "swiglu"
        call = self._make_call(x_TD, weights_TK, up_LGD, down_LDF, idx_TK, gated=gated)
        return self._fused_experts(call, 0, self._ordering_token)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        raise NotImplementedError("a traced layer is described by its graph")
