"""Shared experts of transformers' MoE blocks, run beside the routed ones."""

from typing import Any, final

import torch
from torch import nn

from halley.integrations.transformers.weight_layout import is_experts
from halley.moe.side_stream import SideStream


# Names that blocks of transformers give their shared experts.
_NAMES = ("shared_experts", "shared_expert", "shared_mlp")


def overlap_shared_experts(model: nn.Module) -> list[str]:
    """Begin the shared experts of each MoE block with the block, on a stream of their own.

    On a GPU their products, forward and backward, then run under the communication of the routed
    experts. Values stay the same; on a CPU, and in compiled models, nothing runs at once. This
    helps blocks that call their shared experts after the routed ones, as DeepSeek-V3's and
    GLM-4-MoE's do; where a block calls them first, as Qwen2-MoE's, it waits for them there.

    To be called once, when the model is loaded. Parameters and their names stay.

    Args:
        model: of transformers.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: the model has no MoE block with shared experts, or they are overlapped already.
    """
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, block in model.named_modules():
        if any(is_experts(child) for child in block.children()):
            shared = next((s for n in _NAMES if (s := getattr(block, n, None)) is not None), None)
            if shared is not None:
                found[name] = block, shared
    if not found:
        raise ValueError(f"model ({type(model).__name__}) must have blocks with shared experts")
    for name, (_, shared) in found.items():
        if isinstance(getattr(shared.forward, "__self__", None), _EarlyModule):
            raise ValueError(f"shared experts of {name} must be overlapped once")
    for block, shared in found.values():
        early = _EarlyModule(shared)
        block.register_forward_pre_hook(early.begin)
        shared.forward = early.finish
    return list(found)


@final
class _EarlyModule:
    """Runs a module on its block's input before the block asks for it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward = module.forward
        self._begun: tuple[SideStream, torch.Tensor, int] | None = None

    def begin(self, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Begin with the input of the block; its forward pre-hook."""
        self._begun = None
        module = self._module
        # Hooks, of FSDP for one, run when the block calls the module.
        if torch.compiler.is_compiling() or not arguments or module._forward_pre_hooks:
            return
        x: torch.Tensor = arguments[0]
        # Neither a DTensor's memory nor whether one of inference mode was written to can be told.
        if type(x) is not torch.Tensor or x.is_inference():
            return
        self._begun = SideStream(self._forward, x), x, x._version

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """Return what was begun if it was with these rows; the module's forward."""
        begun, self._begun = self._begun, None
        if begun is not None:
            result, given, version = begun
            if given._version == version and _are_same_rows(x, given):
                y = result.wait()
                return y.view(*x.shape[:-1], y.shape[-1])
        return self._forward(x)


def _are_same_rows(x: torch.Tensor, given: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory, seen as rows of one size."""
    first, second = ((t.data_ptr(), t.numel(), t.shape[-1], t.dtype) for t in (x, given))
    return first == second and x.is_contiguous() and given.is_contiguous()
