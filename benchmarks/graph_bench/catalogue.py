"""Models of Halley's catalogue at their own width, with few layers, for the graph benchmark."""

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.graph_bench.gpt2_moe import EMBEDDING_STD
from benchmarks.model_bench.case import cut_model
from halley.core.config import ModelConfig
from halley.core.timeline import Recorder
from halley.core.types import local_experts
from halley.distributed.mesh import ParallelGroups
from halley.moe.transformer import MoETransformer
from halley.strategies.base import AbstractStrategy


@dataclass(frozen=True, kw_only=True)
class CatalogueShape:
    """A model of the catalogue, and its batch on one rank.

    Attributes:
        config: the model, with the number of layers to measure.
        experts_per_rank: in each MoE layer.
        batch_size: default number of sequences per rank.
    """

    config: ModelConfig
    experts_per_rank: int
    seq_len: int = 2048
    batch_size: int = 2

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def build(
        self,
        groups: ParallelGroups,
        *,
        strategy: AbstractStrategy,
        dtype: torch.dtype,
        device: torch.device,
    ) -> MoETransformer:
        """Return the model; the weights are random, or without values on the device "meta".

        Embeddings are larger than a new model's, so that experts have nearly equal loads.
        """
        model = MoETransformer(
            self.config,
            strategy=strategy,
            groups=groups,
            recorder=Recorder("cpu", enabled=False),
            dtype=dtype,
            device=device,
        )
        if device.type != "meta":
            model.init_weights(seed=0)
            generator = torch.Generator(device).manual_seed(0)
            nn.init.normal_(model.embed_tokens.weight, std=EMBEDDING_STD, generator=generator)
        return model


def find_catalogue_shape(name: str, *, num_layers: int, num_ranks: int) -> CatalogueShape:
    """Return the model of that name with ``num_layers`` layers; its experts divide over the ranks.

    Raises:
        ValueError: the name is unknown, there are too few layers, or the experts do not divide.
    """
    config = cut_model(name, num_layers=num_layers)
    num_local = local_experts(config.moe.num_experts, ep_size=num_ranks)
    return CatalogueShape(config=config, experts_per_rank=num_local)
