"""Tiny torchtitan models, trained on CPU ranks with its own experts or with Halley's."""

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.frameworks.torchtitan_job import all_to_all_with_gloo


_REASON = "torchtitan is not installed: make compat runs these tests with it"


def load(name: str) -> Any:
    return pytest.importorskip(f"torchtitan.{name}", reason=_REASON)


trainer, qwen3, moe = (
    load(name) for name in ("trainer", "models.qwen3.model", "models.common.moe")
)
common, config_utils = (
    load("models.common"),
    load("models.common.config_utils"),
)
config, override = load("config"), load("config.override")
halley_torchtitan: Any = importlib.import_module("halley.integrations.torchtitan")

FLAG = "halley.integrations.torchtitan.enable"
NUM_EXPERTS, DIM, HEAD_DIM, VOCABULARY, SEQ_LEN = 8, 32, 8, 64, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained.

    The backend "spmd_types" runs without FSDP, which would need a torch newer than 2.13. The dtype
    "float32" also replaces the bfloat16 in which torchtitan runs expert GEMMs.
    """

    flag: tuple[str, ...] = ()  # of ``--override.imports``; empty for torchtitan's own experts
    backend: str = "partial_dtensor"  # torchtitan's ``spmd_backend``
    dtype: str = "float32"  # to which FSDP casts parameters for forward and backward
    ep_size: int = 2
    tp_size: int = 1
    changed: bool = False  # use experts that no strategy can run
    compiled: bool = False  # compile each block, as ``--compile.enable`` does
    num_ranks: int = 2
    num_steps: int = 4
    num_microbatches: int = 1  # of a step


class OtherExperts(moe.GroupedExperts):
    """Experts that torchtitan can run and no strategy can."""

    @dataclass(kw_only=True, slots=True)
    class Config(moe.GroupedExperts.Config):
        pass

    def forward(self, x_RD: Any, num_tokens_per_expert_E: Any) -> Any:
        return 2 * super().forward(x_RD, num_tokens_per_expert_E)


def make_config(*, num_experts: int = NUM_EXPERTS, changed: bool = False, **comm: Any) -> Any:
    """Return a model configuration like those of torchtitan's registries."""
    normal = {"weight": partial(nn.init.normal_, std=0.2), "bias": nn.init.zeros_}
    experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal["weight"])

    def norm(size: int) -> Any:
        ones = {"weight": nn.init.ones_}
        return common.nn_modules.RMSNorm.Config(normalized_shape=size, eps=1e-6, param_init=ones)

    def layer() -> Any:
        routed = config_utils.make_routed_experts_config(
            dim=DIM,
            hidden_dim=24,
            num_experts=num_experts,
            top_k=2,
            param_init=experts,
            **{"comm_backend": "standard", **comm},
        )
        if changed:
            routed.inner_experts = config.derive(routed.inner_experts, OtherExperts.Config)
        router = config_utils.make_router_config(
            dim=DIM, num_experts=num_experts, gate_param_init=normal, top_k=2, score_func="softmax"
        )
        rope = common.CosSinRoPE.Config(dim=HEAD_DIM, max_seq_len=SEQ_LEN, theta=1e4)
        return qwen3.Qwen3TransformerBlock.Config(
            attention_norm=norm(DIM),
            ffn_norm=norm(DIM),
            attention=config_utils.make_gqa_config(
                dim=DIM,
                n_heads=4,
                n_kv_heads=2,
                head_dim=HEAD_DIM,
                wqkv_param_init=normal,
                wo_param_init=normal,
                # FlexAttention, torchtitan's default, has no backward on a CPU.
                inner_attention=common.attention.ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=rope,
                qk_norm=norm(HEAD_DIM),
            ),
            moe=config_utils.make_moe_config(
                num_experts=num_experts, router=router, routed_experts=routed
            ),
        )

    return qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=DIM,
        norm=norm(DIM),
        tok_embeddings=common.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=normal
        ),
        lm_head=common.Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=normal),
        layers=[layer() for _ in range(2)],
    )


@contextmanager
def on_cpu(case: Case) -> Iterator[None]:
    """Patch torchtitan so that it runs on a CPU, in float32 if the case says so."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for message in ("In CPU autocast, but", "DTensor random operators may not"):
            warnings.filterwarnings("ignore", message)
        if case.compiled:
            warnings.simplefilter("ignore")  # torch reads .grad of the graphs' inputs
        for name, module in list(sys.modules.items()):
            if name.startswith("torchtitan.") and hasattr(module, "device_type"):
                patch.setattr(module, "device_type", "cpu")
        patch.setattr(dist, "all_to_all", all_to_all_with_gloo)
        if case.dtype == "float32":
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
            patch.setattr(halley_torchtitan, "_DTYPE", torch.float32)
        yield


def build_model(case: Case, model_config: Any) -> tuple[Any, Any]:
    """Return a model as torchtitan's trainer builds it, and the context for its forward."""
    utils = load("distributed.utils")
    parallelism = config.ParallelismConfig(
        data_parallel_shard_degree=dist.get_world_size() // case.tp_size,
        tensor_parallel_degree=case.tp_size,
        expert_parallel_degree=case.ep_size,
        spmd_backend=case.backend,
    )
    parallel_dims = load("distributed").ParallelDims.from_config(parallelism, dist.get_world_size())
    parallel_dims.build_mesh()
    utils.set_spmd_backend(case.backend)
    training = config.TrainingConfig(seq_len=SEQ_LEN, mixed_precision_param=case.dtype)
    # The rest of the trainer's configuration has no effect on the model.
    words = override.OverrideConfig(imports=override.parse_cli_imports(list(case.flag)))
    parts = SimpleNamespace(parallelism=parallelism, training=training)
    model_config.update_from_config(config=parts)
    override.apply_overrides(words, model_config)
    with torch.device("meta"):
        model = model_config.build()
    model.verify_module_protocol()
    load("models.qwen3").parallelize_qwen3(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=config.CompileConfig(enable=case.compiled, backend="aot_eager"),
        ac_config=None,
        dump_folder="",
        skip_dp=case.backend == "spmd_types",
    )
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sums
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return model, utils.get_spmd_context(parallel_dims=parallel_dims)


def train(rank: int, num_ranks: int, case: Case, num_steps: int) -> tuple[list[float], Any]:
    """Train on random tokens; return the mean loss of each step, and the descriptions."""
    with on_cpu(case):
        model, context = build_model(case, make_config(changed=case.changed))
        generator = torch.Generator().manual_seed(rank // case.tp_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[float] = []
        for _ in range(num_steps):
            loss = 0.0
            for _ in range(case.num_microbatches):
                tokens = torch.randint(0, VOCABULARY, (2, SEQ_LEN + 1), generator=generator)
                inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                loss += run_microbatch(model, context, inputs, labels, case) / case.num_microbatches
            losses.append(loss)
            if case.backend == "spmd_types":
                add_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return losses, halley_torchtitan.describe(model)


def run_microbatch(model: Any, context: Any, inputs: Any, labels: Any, case: Case) -> float:
    spmd = pytest.importorskip("spmd_types")
    num_groups = dist.get_world_size() // case.tp_size
    with context():
        logits = model(inputs)
        with spmd.no_typecheck():
            local = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            loss = F.cross_entropy(local.flatten(0, 1).float(), labels.flatten(), reduction="mean")
            (loss / num_groups).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def add_gradients(model: Any) -> None:
    """All-reduce gradients of replicated parameters; experts' gradients sum over ranks already."""
    for name, parameter in model.named_parameters():
        if "inner_experts" not in name:
            dist.all_reduce(parameter.grad)
