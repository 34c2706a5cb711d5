"""Configure torchtitan's trainer for a job: model, tokens, and a log of every step."""

import os
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import (
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import fsdp
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE, attention
from torchtitan.models.qwen3 import parallelize as qwen3_parallelize
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from benchmarks.frameworks.job import (
    CHECKED_STEP,
    EMBEDDING_STD,
    LEARNING_RATE,
    NUM_WARMUP,
    Job,
    Measured,
    Variant,
    expert_gradient_norm,
)
from benchmarks.gpu_memory import unused_pool_bytes, used_mib
from halley.tools.timer import max_over_ranks


HALLEY = "halley.integrations.torchtitan.enable"


class Steps(MetricsProcessor):
    """torchtitan's log, which also keeps time, loss and memory of every step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's options of its log."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.times_us, self.losses = list[float](), list[float]()
        self.peak_mib = self.used_mib = 0.0
        self._pool_bytes = 0
        self.gradient_norm, self._begin = 0.0, time.perf_counter()

    def log(self, step: int, global_avg_loss: float, *others: Any, **named: Any) -> None:
        """Keep the step, then log it; the trainer has read its loss, so the device is done."""
        end = time.perf_counter()
        self.times_us.append(1e6 * (end - self._begin))
        self.losses.append(global_avg_loss)
        if torch.cuda.is_available():
            self._measure_memory(step)
        if step == CHECKED_STEP:
            self.gradient_norm = expert_gradient_norm(self.model_parts[0], "inner_experts")
        super().log(step, global_avg_loss, *others, **named)
        self._begin = time.perf_counter()

    def _measure_memory(self, step: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        if step == NUM_WARMUP - 1:
            torch.cuda.empty_cache()
        elif step == NUM_WARMUP:
            self.used_mib, self._pool_bytes = used_mib(device), unused_pool_bytes(device)
        elif step > NUM_WARMUP:  # torchtitan resets the peak at the end of each log
            peak_bytes = torch.cuda.max_memory_allocated(device) + self._pool_bytes
            self.peak_mib = max(self.peak_mib, peak_bytes / 2**20)

    def measured(self, ran: str) -> Measured:
        """Return the steps after the warm-up, with the time of the slowest rank; a collective."""
        values = [self.peak_mib, self.used_mib, *self.times_us[NUM_WARMUP:]]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        group = torch.distributed.group.WORLD
        peak_mib, used_mib, *samples_us = max_over_ranks(values, device=device, group=group)
        return Measured(
            samples_us=samples_us,
            losses=self.losses[:CHECKED_STEP],
            gradient_norm=self.gradient_norm,
            peak_mib=peak_mib or None,
            used_mib=used_mib or None,
            ran=ran,
        )


@dataclass(kw_only=True, slots=True)
class Tokens(BaseDataLoader.Config):
    """Stands for a data loader; builds the batches of a job, one document a sequence."""

    job: Job

    def build(self, *, dp_rank: int, **_: Any) -> list[Any]:
        """Return inputs and labels of all steps of a rank."""
        batches: list[Any] = []
        positions = torch.arange(self.job.seq_len).repeat(self.job.batch_size, 1)
        for step in range(NUM_WARMUP + self.job.num_samples):
            ids = self.job.tokens(dp_rank, step)
            inputs = {"input": ids[:, :-1].contiguous(), "positions": positions}
            batches.append((inputs, ids[:, 1:].contiguous()))
        return batches


@dataclass(kw_only=True, slots=True)
class NoTokenizer(BaseTokenizer.Config):
    """Stands for a tokenizer, which token ids do not need."""

    def build(self, **_: Any) -> None:
        """Return nothing."""


class SaveHalley(SelectiveAC):
    """Selective checkpointing that also saves results of Halley's operator, as of all-to-alls."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's options of selective checkpointing."""

    def get_save_ops(self) -> set[Any]:
        """Return torchtitan's operators and Halley's."""
        return super().get_save_ops() | {torch.ops.halley.fused_experts.default}


CHECKPOINTING = {
    "selective": SelectiveAC.Config,
    "full": FullAC.Config,
    "selective+halley": SaveHalley.Config,
    "none": lambda: None,
}


def make_trainer(job: Job, variant: Variant) -> Trainer:
    """Return torchtitan's trainer of a variant: FSDP2, experts over all ranks, AdamW."""
    imports: list[Any] = list(variant.overrides)
    if variant.experts == "halley":
        options = {"strategy": job.strategy, "strict": True, "max_load": variant.max_load}
        imports.append((HALLEY, options))
    loss = CrossEntropyLoss.Config(global_vocab_size=job.config().vocab_size)
    config = Trainer.Config(
        model_spec=make_model(job, variant),
        loss=loss,
        tokenizer=NoTokenizer(),
        dataloader=Tokens(job=job),
        metrics=Steps.Config(log_freq=1),
        optimizer=default_adamw(lr=LEARNING_RATE),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=job.batch_size,
            seq_len=job.seq_len,
            steps=NUM_WARMUP + job.num_samples,
            disable_cuda_graphs=not variant.cuda_graphs,
        ),
        parallelism=ParallelismConfig(
            expert_parallel_degree=int(os.environ["WORLD_SIZE"]),
            spmd_backend="partial_dtensor",  # FSDP with "spmd_types" needs a newer torch than 2.11
        ),
        debug=DebugConfig(seed=0),  # the same weights in all jobs
        activation_checkpoint=CHECKPOINTING[variant.checkpointing](),
        compile=CompileConfig(
            enable=variant.compiled, backend="aot_eager" if job.on_cpu else "inductor"
        ),
        override=OverrideConfig(imports=imports),
    )
    return config.build()


def make_model(job: Job, variant: Variant) -> ModelSpec:
    """Return torchtitan's Qwen3-MoE with the sizes of the job's model."""
    size = job.config()
    backend, options = variant.experts, dict[str, Any]()
    if backend == "halley":  # whose layers replace those of a backend
        backend = "hybridep" if variant.cuda_graphs else "standard"
        options = {"non_blocking_capacity_factor": 1.0} if variant.cuda_graphs else {}
    spec = qwen3.model_registry("30B-A3B")
    model = spec.model
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=size.num_layers,
        dim=size.hidden_size,
        n_heads=size.num_heads,
        n_kv_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        moe_hidden_dim=size.moe.intermediate_size,
        num_experts=size.moe.num_experts,
        top_k=size.moe.top_k,
        attn_backend="flex",
        moe_comm_backend=backend,
        **options,
        rope=CosSinRoPE.Config(dim=size.head_dim, max_seq_len=job.seq_len, theta=size.rope_theta),
    )
    if job.on_cpu:
        for layer in layers:  # FlexAttention has no backward on a CPU
            layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    dim, vocab_size = size.hidden_size, size.vocab_size
    model = replace(
        model,
        dim=dim,
        vocab_size=vocab_size,
        norm=replace(model.norm, normalized_shape=dim),
        tok_embeddings=replace(
            model.tok_embeddings,
            embedding_dim=dim,
            num_embeddings=vocab_size,
            param_init={"weight": partial(nn.init.normal_, std=EMBEDDING_STD)},
        ),
        lm_head=replace(model.lm_head, in_features=dim, out_features=vocab_size),
        layers=layers,
    )
    return replace(spec, flavor=size.name, model=model, parallelize_fn=parallelize)


def parallelize(model: nn.Module, **options: Any) -> nn.Module:
    """Parallelize as torchtitan does, also with torch 2.11 and on CPU ranks."""
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        vars(qwen3_parallelize)["apply_fsdp_to_decoder"] = apply_fsdp_with_torch_2_11
        # Inductor of torch 2.11 fails on assertions between forward and backward of a block.
        dynamo_config.do_not_emit_runtime_asserts = True
        vars(attention)["_compiled_create_block_mask"] = create_mask_with_torch_2_11
        keep_attention_masks(model)
    model = qwen3.parallelize_qwen3(model, **options)
    if not torch.cuda.is_available():
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has only plain sums
    return model


def create_mask_with_torch_2_11(*args: Any, separate_full_blocks: bool, **options: Any) -> Any:
    """Return a ``BlockMask``; torch 2.11 lacks the option, and separates full blocks always."""
    assert separate_full_blocks
    return create_block_mask(*args, **options)


def keep_attention_masks(model: Any) -> None:
    """Use the attention masks of the first step in all steps, which have the same positions.

    torchtitan's CUDA graphs need equal masks. In torch 2.11, two masks that were built alike are
    equal only if they are one object.
    """
    build, kept = model.get_attention_masks, list[Any]()

    def masks(positions: torch.Tensor) -> Any:
        if not kept:
            kept.append(build(positions=positions))
        return kept[0]

    vars(model)["get_attention_masks"] = masks


def apply_fsdp_with_torch_2_11(model: Any, *args: Any, **options: Any) -> None:
    """Apply FSDP2 to all parameters but the experts', each of which only one rank holds.

    FSDP2 of torch 2.11 has one mesh for a block. torchtitan gives experts a mesh of their own. It
    has one rank here, so FSDP would only cast them to bfloat16, which their forward does too.
    """
    if options["edp_mesh"].size() != 1:
        raise ValueError("torch must be 2.12 or newer if several ranks hold an expert")
    blocks = list(model.layers.values())
    experts = {p for name, p in model.named_parameters() if "inner_experts" in name}
    vars(fsdp)["fully_shard"] = partial(fully_shard, ignored_params=experts)
    fsdp.apply_fsdp_to_decoder(model, *args, **{**options, "ep_degree": 1, "edp_mesh": None})
    # torchtitan names what to prefetch if there is expert parallelism.
    for module, following in pairwise([model.tok_embeddings, *blocks, model.lm_head]):
        module.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([module])
