"""Halley's layer in the specs that Megatron builds models from."""

import copy
import importlib
from dataclasses import fields, is_dataclass
from typing import Any

from halley.integrations.megatron.mcore import megatron
from halley.integrations.megatron.moe_layer import HalleyMoELayer


def use_halley(spec: Any, *, strategy: str = "auto", strict: bool = False) -> Any:
    """Return a spec with Halley's layer in the place of each of Megatron's MoE layers.

    Args:
        spec: a ``ModuleSpec``, or a ``TransformerBlockSubmodules``, as Megatron's
            ``get_gpt_decoder_block_spec`` returns it; left as it is.
        strategy, strict: as for ``HalleyMoELayer``.

    Raises:
        ValueError: it has no MoE layer.
    """
    copied = copy.deepcopy(spec)
    found = [part for part in _walk(copied) if part.module is megatron.MoELayer]
    if not found:
        raise ValueError(f"spec ({type(spec).__name__}) must have a layer with module MoELayer")
    for part in found:
        part.module = HalleyMoELayer
        part.params = {**(part.params or {}), "strategy": strategy, "strict": strict}
    return copied


def _walk(part: Any) -> list[Any]:
    """Return all module specs in a spec, each once."""
    if isinstance(part, megatron.ModuleSpec):
        return [part, *_walk(part.submodules)]
    if isinstance(part, list | tuple):
        found = [each for item in part for each in _walk(item)]
        return list({id(each): each for each in found}.values())  # layers may share one
    if is_dataclass(part) and not isinstance(part, type):
        return _walk([getattr(part, field.name) for field in fields(part)])
    return []


def job_spec() -> Any:
    """Return the spec of the running job of Megatron-LM with Halley's layers; None outside of one.

    Megatron-LM makes a model's spec itself unless ``--spec`` names one; this is the one that it
    would have made, from the job's arguments.

    Raises:
        ValueError: the job has virtual pipeline stages and dense layers among its MoE layers, so
            that each stage has a spec of its own.
    """
    try:
        training: Any = importlib.import_module("megatron.training")
        arguments = training.get_args()
    except (ModuleNotFoundError, AssertionError):  # no Megatron-LM, or none that has started
        return None
    frequency = arguments.moe_layer_freq
    mixed = frequency != 1 and frequency != [1] * arguments.num_layers
    if mixed and getattr(arguments, "virtual_pipeline_model_parallel_size", None):
        raise ValueError(
            f"moe_layer_freq ({frequency}) must be 1 with virtual pipeline stages: each has "
            "another spec, which a script of your own can give to use_halley"
        )
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = importlib.import_module("megatron.training.arguments")
    job = config.core_transformer_config_from_args(arguments)
    options = {
        "use_transformer_engine": arguments.transformer_impl == "transformer_engine",
        "normalization": arguments.normalization,
        "qk_l2_norm": arguments.qk_l2_norm,
    }
    if mixed:
        return use_halley(specs.get_gpt_decoder_block_spec(job, **options))
    # The spec of one layer fits every stage.
    return use_halley(specs.get_gpt_decoder_layer_specs(job, **options)[0])
