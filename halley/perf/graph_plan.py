"""What the compiler's passes would do to a model, without ranks, devices or memory for it."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from halley.compiler import Backend, OrderReport
from halley.compiler.fake import without_values
from halley.compiler.options import parse_options
from halley.core.config import RunConfig
from halley.core.timeline import Recorder
from halley.core.types import DTYPES
from halley.cost.hardware import Hardware
from halley.moe.model import MoETransformer
from halley.moe.parallel import build_groups
from halley.strategies.functional import FunctionalStrategy


def plan_graphs(
    config: RunConfig,
    *,
    passes: str,
    num_ranks: int,
    hardware: Hardware,
    num_parts: int = 0,
    memory_margin: float = 0.02,
) -> list[OrderReport]:
    """Return what passes do to forward and to backward of a run's model, as predicted.

    The model is traced with tensors that have no values, in a group whose other ranks are not
    there. Rows of a rank are those of an even load.

    Args:
        config: model, batch, dtype and ``ep_size`` of the run.
        passes, num_parts, memory_margin: as of ``halley.compiler.options``.
        num_ranks: of the run.
        hardware: whose figures times are predicted from.

    Raises:
        ValueError: an option is not allowed, or experts and ranks do not fit each other.
        RuntimeError: this process is one of several ranks already.
    """
    num_tokens = config.train.batch_size * config.data.seq_len
    options: dict[str, Any] = {
        "passes": passes,
        "inner": "eager",
        "agree": False,
        "hardware": hardware,
        "num_parts": num_parts,
        "memory_margin": memory_margin,
        "unknown_size": num_tokens * config.model.moe.top_k,
    }
    parse_options(options)  # before Dynamo wraps what is wrong with them
    backend = Backend()
    recorder = Recorder("cpu", enabled=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's own, of how it traces
        stack.enter_context(_alone(num_ranks))
        groups = build_groups(config.ep_size, device_type="cpu")
        stack.enter_context(without_values())
        stack.enter_context(torch._dynamo.config.patch(capture_scalar_outputs=True))
        model = MoETransformer(
            config.model,
            strategy=FunctionalStrategy(groups.ep),
            groups=groups,
            recorder=recorder,
            dtype=DTYPES[config.train.dtype],
        )
        tokens_BS = torch.zeros(config.train.batch_size, config.data.seq_len, dtype=torch.int64)
        compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
        output = compiled(tokens_BS)
        (output.logits_BSV.float().sum() + output.router_loss).backward()  # compiles backward
    return backend.reports


@contextlib.contextmanager
def _alone(num_ranks: int) -> Iterator[None]:
    """Let this process be rank 0 of a group whose other ranks are not there."""
    if dist.is_initialized():
        raise RuntimeError("a plan is made by one process: this one is a rank of several")
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
