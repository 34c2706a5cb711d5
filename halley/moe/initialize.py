"""Initialize parameters from a seed, so that they do not depend on the number of ranks.

Every parameter, and every expert of a stacked parameter, has a random generator of its own, seeded
with its name. A rank draws the experts that it holds; shards are cut from full experts.
"""

import zlib

import torch
from torch import nn

from halley.moe.dense import RMSNorm
from halley.moe.experts import GroupedExperts
from halley.moe.router import SigmoidRouter


_STD = 0.02


@torch.no_grad()
def init_parameters(model: nn.Module, *, seed: int) -> None:
    """Initialize a model, or one layer: matrices normal with std 0.02, norms 1, biases 0.

    Parameters that ranks share, and replicas of an expert, get equal values on all ranks.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}"
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif isinstance(module, GroupedExperts):
                for index, expert in zip(module.expert_ids, parameter, strict=True):
                    shape, expert_name = module.full_shape(name), f"{full_name}.{index}"
                    full = _draw(shape, expert_name, seed=seed, device=expert.device)
                    expert.copy_(module.local_shard(name, full))
            else:
                parameter.copy_(
                    _draw(parameter.shape, full_name, seed=seed, device=parameter.device)
                )
        if isinstance(module, SigmoidRouter):
            module.bias.zero_()


def _draw(shape: tuple[int, ...], name: str, *, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values = torch.empty(shape, dtype=torch.float32, device=device)
    return values.normal_(0.0, _STD, generator=generator)
