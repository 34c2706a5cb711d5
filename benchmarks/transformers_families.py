"""Run the common model tests of transformers on tiny models of four families.

``transformers_suite.py`` runs this file inside a source distribution of transformers, because the
file imports from its ``tests``.
"""

import unittest
from typing import Any

import transformers
from tests.test_modeling_common import (  # pyright: ignore[reportMissingImports]
    ModelTesterMixin,
    ids_tensor,
)


_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"Mixtral": "num_local_experts", "Qwen2Moe": "num_experts", "Qwen3Moe": "num_experts"}


class Tester:
    """The sizes, configuration and inputs of a model family, for the shared tests."""

    batch_size, seq_length, is_training = 3, 7, True
    num_hidden_layers, num_attention_heads, hidden_size = 2, 2, 32

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self) -> Any:
        experts = {_EXPERTS.get(self.family, "num_experts"): 8}
        return getattr(transformers, f"{self.family}Config")(**_SIZES, **experts)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = ids_tensor([self.batch_size, self.seq_length], _SIZES["vocab_size"])
        return self.get_config(), {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)}


def _suite(family: str) -> type:
    names = (f"{family}Model", f"{family}ForCausalLM")

    class Suite(ModelTesterMixin, unittest.TestCase):
        all_model_classes = tuple(getattr(transformers, name) for name in names)
        test_all_params_have_gradient = False  # an expert may get no token

        def setUp(self) -> None:
            self.model_tester = Tester(family)

    Suite.__name__ = Suite.__qualname__ = f"{family}Test"
    return Suite


MixtralTest = _suite("Mixtral")
Qwen2MoeTest = _suite("Qwen2Moe")
Qwen3MoeTest = _suite("Qwen3Moe")
OlmoeTest = _suite("Olmoe")
