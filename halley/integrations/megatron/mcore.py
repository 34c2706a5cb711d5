"""What is taken from Megatron-Core."""

from types import SimpleNamespace
from typing import Any

from halley.integrations.versions import check_arguments, import_parts


NEWEST = (0, 16)  # the newest minor version that the tests run with

_PARTS = {
    "MegatronModule": "megatron.core.transformer.module",
    "MoELayer": "megatron.core.transformer.moe.moe_layer",
    "MoETokenDispatcher": "megatron.core.transformer.moe.token_dispatcher",
    "ModuleSpec": "megatron.core.transformer.spec_utils",
    "ShardedTensor": "megatron.core.dist_checkpointing",
    "ShardedTensorFactory": "megatron.core.dist_checkpointing.mapping",
    "make_sharded_object_for_checkpoint": "megatron.core.transformer.utils",
    "apply_swiglu_sharded_factory": "megatron.core.transformer.mlp",
    "get_cuda_rng_tracker": "megatron.core.tensor_parallel",
    "get_expert_parallel_rng_tracker_name": "megatron.core.tensor_parallel.random",
    "set_tensor_model_parallel_attributes": "megatron.core.tensor_parallel.layers",
    "get_default_pg_collection": "megatron.core.transformer.moe.moe_utils",
}
_COMPUTE = ("self", "hidden_states", "probs")


def _find_parts() -> Any:
    found = import_parts("megatron.core", _PARTS, install="megatron-core", newest=NEWEST)
    parts = SimpleNamespace(**dict(zip(_PARTS, found, strict=True)))
    for method in (parts.MoELayer.dispatch, parts.MoELayer.routed_experts_compute):
        check_arguments(method, _COMPUTE, package="megatron.core", newest=NEWEST)
    return parts


megatron: Any = _find_parts()
