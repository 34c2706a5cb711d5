"""A model compiled as a whole, with passes that hide communication in its graphs."""

from collections.abc import Callable
from typing import Any

import torch

from halley.core.config import RunConfig, num_even_rows
from halley.cost.profiles import default_path
from halley.moe.transformer import ModelOutput, MoETransformer
from halley.strategies.registry import PLANNED


_TIMEOUT_S = 600.0  # for which ranks wait while the first of them measures and plans
_IN_GRAPHS = ("functional", "unfused", "fused", PLANNED)


def check_passes(config: RunConfig) -> None:
    """Check that the passes of a run can have a graph of the whole model.

    Raises:
        ValueError: a strategy breaks the graph, activations are computed again in backward, or
            experts have a placement.
    """
    if config.passes == "none":
        return
    for name in config.strategy.split(","):
        if name.strip().partition(":")[0] not in _IN_GRAPHS:
            raise ValueError(
                f"strategy ({name.strip()}) must be functional, unfused or fused for passes "
                f"{config.passes}: others are no part of a graph"
            )
    if config.model.moe.expert_bias:
        raise ValueError(
            f"model.moe.expert_bias (true) must be false for passes {config.passes}: strategies "
            "that are part of a graph add no bias"
        )
    if config.train.activation_checkpointing:
        raise ValueError(
            f"train.activation_checkpointing (true) must be false for passes {config.passes}"
        )
    if config.placement:
        raise ValueError(
            f"placement ({config.placement}) must be '' for passes {config.passes}: the sum of the "
            "gradients of replicas is no part of a graph"
        )


def compile_model(
    model: MoETransformer, config: RunConfig, device: torch.device
) -> Callable[[torch.Tensor], ModelOutput]:
    """Return the model's forward, compiled with the passes of a run at its first call.

    Args:
        model: with strategies that ``check_passes`` allows.
        config: of the run.
        device: of the model. On a CPU operators run one by one: Inductor would take minutes.

    Passes plan by measured times, as a wire's speed is not known otherwise.
    """
    # Only here: with torch's compiler comes Triton, before it is known how kernels are to run.
    import torch._dynamo.config

    from halley.compiler import Backend

    options: dict[str, Any] = {
        "passes": config.passes,
        "inner": "inductor" if device.type == "cuda" else "eager",
        "unknown_size": num_even_rows(config),
        "timeout_s": _TIMEOUT_S,
    }
    if profiles := _find_profiles(config, device):
        options |= {"profiles": profiles, "measure": True}
    compiled = torch.compile(model, backend=Backend(), fullgraph=True, options=options)

    def forward(tokens_BS: torch.Tensor) -> ModelOutput:
        with torch._dynamo.config.patch(capture_scalar_outputs=True):  # splits of all-to-alls
            return compiled(tokens_BS)

    return forward


def _find_profiles(config: RunConfig, device: torch.device) -> str:
    """Return the file of measured times of a run, or "" for none."""
    if config.profiles != "auto":
        return config.profiles
    return str(default_path()) if device.type == "cuda" else ""
