"""Capture the forward graph of a small GPT-2 with experts, to change it and run it."""

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx

from halley.compiler.partition.propagation import BatchFlow, propagate_batch
from halley.compiler.partition.rules import all_rules
from halley.cost.hardware import H200
from halley.distributed.mesh import ParallelGroups
from tests.compiler.gpu_attention import AsOnGPU, attend_by
from tests.compiler.model_case import SEQ_LEN, build_narrow, whole_graphs
from tests.moe.model_case import make_tokens


BATCH_SIZE = 12
# Memory and link are so slow that bytes decide, not launches: 1000 bytes of memory in 1 us.
SLOW = dataclasses.replace(
    H200,
    memory_bytes_per_s=1e9,
    fused_bytes_per_s=1e9,
    link_bytes_per_s=2e8,
    link_latency_us=5.0,
    launch_us=0.5,
    graph_us=0.0,
    kernel_us=0.5,
    split_sum_us=0.0,
)


class Captured:
    """Forward graph of a model with one layer of experts, and inputs to run it.

    Args:
        gate: of the router.
        attention: name of a GPU's attention operator; "" for that of a CPU.
    """

    def __init__(self, gate: Any, attention: str = "") -> None:
        from torch._dynamo.backends.common import aot_autograd

        model = build_narrow(gate, ParallelGroups(ep=torch.distributed.group.WORLD), num_layers=2)
        found: list[Any] = []

        def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            def call(args: list[Any]) -> Any:
                found.append((gm, list(args)))
                return AsOnGPU(gm).run(*args)

            call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
            return call

        attend = attend_by(attention) if attention else F.scaled_dot_product_attention
        with (
            whole_graphs(),
            warnings.catch_warnings(),
            mock.patch.object(F, "scaled_dot_product_attention", attend),
        ):
            warnings.simplefilter("ignore")
            torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(
                make_tokens(0, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
            )
        self.module, self.args = found[0]
        inputs = self.module.graph.find_nodes(op="placeholder")
        self.batch_inputs = [n.name for n in inputs if n.meta["val"].dtype == torch.int64]

    def graph(self) -> fx.Graph:
        """Return a copy of the graph."""
        copy = fx.Graph(owning_module=self.module)
        copy.output(copy.graph_copy(self.module.graph, {}))
        return copy

    def flow(self, graph: fx.Graph) -> BatchFlow:
        return propagate_batch(graph, self.batch_inputs, all_rules({}))

    @torch.no_grad()
    def run(self, graph: fx.Graph) -> list[Any]:
        return AsOnGPU(fx.GraphModule(self.module, graph)).run(*self.args)


@functools.cache
def capture(gate: Any) -> Captured:
    """Return the case of a gate, which is traced once in a process."""
    return Captured(gate)


@contextmanager
def joined() -> Iterator[None]:
    """Concatenate microbatches by ``cat`` at the end, also where in-place concat is possible."""
    with (
        mock.patch("halley.compiler.partition.concat.fits_in_place", return_value=False),
        mock.patch("halley.compiler.partition.concat_cost.fits_in_place", return_value=False),
    ):
        yield


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph without inputs and output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]
