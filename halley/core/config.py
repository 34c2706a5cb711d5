"""A whole run as one tree of frozen dataclasses; each checks itself when it is made."""

import math
from dataclasses import dataclass
from typing import Literal

from halley.core.types import Activation


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        condition, rule = False, "finite"  # no number of a run may be another
    if not condition:
        raise ValueError(f"{name} ({value}) must be {rule}")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts.

    Attributes:
        kind: "softmax" (Mixtral, Qwen), "sigmoid" (DeepSeek-V3: groups and a selection bias),
            "switch" (top-1 with capacity) or "top2" (GShard, with capacity).
        normalize: divide the weights of a token's experts by their sum (softmax and sigmoid;
            switch never does, top2 always).
        capacity_factor: an expert takes at most ``capacity_factor * T * K / E`` slots of a rank's
            microbatch, the rest are dropped; 0 is dropless.
        priority: whose slots an expert with a capacity takes: the earlier token's ("order"), or
            that of the token with the larger weight (batch prioritized routing).
        num_groups, num_limited_groups: sigmoid only; experts are chosen from the best
            ``num_limited_groups`` of ``num_groups`` groups.
        scaling_factor: sigmoid only; multiplies the weights.
        bias_update_rate: sigmoid only; step of the selection bias after each training step.
        balance_coefficient: of the load-balancing loss.
        z_coefficient: of the z loss.
    """

    kind: Literal["softmax", "sigmoid", "switch", "top2"] = "softmax"
    normalize: bool = True
    capacity_factor: float = 0.0
    priority: Literal["order", "weight"] = "order"
    num_groups: int = 1
    num_limited_groups: int = 1
    scaling_factor: float = 1.0
    bias_update_rate: float = 0.001
    balance_coefficient: float = 0.01
    z_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for name in ("capacity_factor", "bias_update_rate", "balance_coefficient", "z_coefficient"):
            value = getattr(self, name)
            _require(value >= 0, name, value, "at least 0")
        _require(self.scaling_factor > 0, "scaling_factor", self.scaling_factor, "above 0")
        if self.priority == "weight":
            factor = self.capacity_factor
            _require(factor > 0, "capacity_factor", factor, "above 0 for priority weight")
        _require(self.num_groups >= 1, "num_groups", self.num_groups, "at least 1")
        _require(
            1 <= self.num_limited_groups <= self.num_groups,
            "num_limited_groups",
            self.num_limited_groups,
            f"between 1 and num_groups ({self.num_groups})",
        )
        if self.kind in ("switch", "top2"):
            _require(
                self.capacity_factor > 0,
                "capacity_factor",
                self.capacity_factor,
                f"above 0 for the {self.kind} router",
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer.

    Attributes:
        intermediate_size: of one expert, F.
        shared_intermediate_size: of the shared experts together; 0 for none.
        shared_gate: weight the shared experts' output by a sigmoid gate (Qwen2-MoE).
        expert_bias: experts have biases (GPT-OSS).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: Activation = "swiglu"
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router: RouterConfig = RouterConfig()

    def __post_init__(self) -> None:
        _require(self.num_experts >= 1, "num_experts", self.num_experts, "at least 1")
        shared_size = self.shared_intermediate_size
        _require(shared_size >= 0, "shared_intermediate_size", shared_size, "at least 0")
        _require(self.intermediate_size >= 1, "intermediate_size", self.intermediate_size, ">= 1")
        _require(
            1 <= self.top_k <= self.num_experts,
            "top_k",
            self.top_k,
            f"between 1 and num_experts ({self.num_experts})",
        )
        _require(
            self.num_experts % self.router.num_groups == 0,
            "num_experts",
            self.num_experts,
            f"divisible by num_groups ({self.router.num_groups})",
        )
        allowed = self.num_experts // self.router.num_groups * self.router.num_limited_groups
        _require(
            self.top_k <= allowed,
            "top_k",
            self.top_k,
            f"at most the experts of num_limited_groups groups ({allowed})",
        )
        wanted = {"switch": 1, "top2": 2}.get(self.router.kind, self.top_k)
        _require(self.top_k == wanted, "top_k", self.top_k, f"{wanted} for {self.router.kind}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only MoE transformer.

    Attributes:
        name: the named shape that it comes from.
        num_dense_layers: the first layers have a dense feed-forward network.
        moe_interval: of the others, every ``moe_interval``-th is an MoE layer, the last of each
            interval; 1 makes all of them MoE.
        dense_intermediate_size: of the dense feed-forward networks.
        qk_norm: RMSNorm of queries and keys: per head (Qwen3), over all heads (OLMoE) or none.
        hf_family: the Hugging Face architecture with these very equations, or "" if there is
            none; export needs one.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: MoEConfig
    num_dense_layers: int = 0
    moe_interval: int = 1
    dense_intermediate_size: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: Literal["none", "head", "full"] = "none"
    attention_bias: bool = False
    hf_family: Literal["", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"] = ""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads",
            self.num_heads,
            f"divisible by num_kv_heads ({self.num_kv_heads})",
        )
        _require(
            self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, >= 2"
        )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            _require(value > 0, name, value, "above 0")
        size = self.dense_intermediate_size
        _require(size >= 0, "dense_intermediate_size", size, "at least 0")
        _require(self.moe_interval >= 1, "moe_interval", self.moe_interval, "at least 1")
        _require(
            0 <= self.num_dense_layers <= self.num_layers,
            "num_dense_layers",
            self.num_dense_layers,
            f"between 0 and num_layers ({self.num_layers})",
        )
        if not all(self.is_moe_layer(index) for index in range(self.num_layers)):
            _require(size >= 1, "dense_intermediate_size", size, "at least 1 for dense layers")

    def is_moe_layer(self, index: int) -> bool:
        """Return whether layer ``index`` is an MoE layer."""
        past_dense = index - self.num_dense_layers
        return past_dense >= 0 and past_dense % self.moe_interval == self.moe_interval - 1

    @property
    def num_moe_layers(self) -> int:
        """How many of the layers are MoE layers."""
        return sum(map(self.is_moe_layer, range(self.num_layers)))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text to train on.

    Attributes:
        path: a file or folder of text; None is the standard library's sources of this Python.
        seq_len: bytes a sequence.
    """

    path: str | None = None
    seq_len: int = 256

    def __post_init__(self) -> None:
        _require(self.path != "", "data.path", self.path, "a file or a folder, or left out")
        _require(self.seq_len >= 1, "data.seq_len", self.seq_len, "at least 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (or plain SGD) with linear warm-up, then cosine decay.

    Attributes:
        warmup_steps: steps over which the rate rises from 0.
        final_fraction: share of ``learning_rate`` that is left behind the last step.
        clip_norm: largest global gradient norm; 0 does not clip.
    """

    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        rate = self.learning_rate
        _require(rate > 0, "optimizer.learning_rate", rate, "above 0")
        _require(self.eps > 0, "optimizer.eps", self.eps, "above 0")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "at least 0")
        for name in ("weight_decay", "clip_norm", "final_fraction"):
            value = getattr(self, name)
            _require(value >= 0, f"optimizer.{name}", value, "at least 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}", value, "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
        num_steps: optimizer steps of the whole run.
        batch_size: sequences of one rank's microbatch.
        num_microbatches: microbatches whose gradients are added before a step.
        dtype: of parameters and activations; optimizer state is float32 always.
        activation_checkpointing: keep only each layer's input and compute it again in backward,
            communication included.
        deterministic: the same bits in every run. On GPUs attention's gradient, which otherwise
            adds up in the order in which parts of it come, takes a slower kernel.
        log_every: steps between lines of the log when there is no terminal.
        tensorboard: write TensorBoard events beside the metrics.
    """

    num_steps: int = 300
    batch_size: int = 8
    num_microbatches: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    activation_checkpointing: bool = False
    deterministic: bool = False
    log_every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "num_microbatches", "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        _require(self.seed >= 0, "train.seed", self.seed, "at least 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, written under ``<output>/checkpoints``.

    Attributes:
        every_steps: steps between checkpoints; 0 writes only the last.
        keep: how many stay.
        resume: go on from the newest valid one; false refuses a folder that holds any.
    """

    every_steps: int = 0
    keep: int = 2
    resume: bool = True

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "at least 0")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run.

    Attributes:
        output: folder for metrics, checkpoints and exports.
        strategy: how routed experts run, as ``moe.strategy`` names it; or one for each MoE layer,
            by commas; or "planned", those that are predicted to make a step fastest.
        passes: over graphs of the compiled model, as ``halley.compiler`` has them; others than
            "none" want strategies that graphs can have: "functional", "unfused", "fused".
        profiles: file of measured times by which passes plan; ranks add what it lacks. "auto" is
            the one of the user's cache folder on GPUs, and none on CPUs; "" predicts all times.
        num_chunks: chunks of the chunked strategy; 0 lets the cost model choose.
        max_load: for how many times the rows of a balanced load the fused strategy makes room, so
            that the host need not ask the device at each call; 0 for any load.
        ep_size: ranks over which the experts are spread; 0 for all ranks.
        expert_tp_size: how many neighbours of those share each expert, by its intermediate size.
        placement: file that says which experts each of these ranks holds, as ``halley plan
            balance`` writes it; "" for the plain placement.
        device: "auto" takes CUDA where there is a device.
    """

    model: ModelConfig
    output: str = "runs/halley"
    strategy: str = "sequential"
    passes: Literal["none", "wgrad", "partition", "both"] = "none"
    profiles: str = "auto"
    num_chunks: int = 0
    max_load: float = 0.0
    ep_size: int = 0
    expert_tp_size: int = 1
    placement: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        _require(self.ep_size >= 0, "ep_size", self.ep_size, "at least 0")
        _require(
            self.max_load == 0 or self.max_load >= 1, "max_load", self.max_load, "0 or at least 1"
        )
        _require(self.expert_tp_size >= 1, "expert_tp_size", self.expert_tp_size, "at least 1")
        _require(self.num_chunks >= 0, "num_chunks", self.num_chunks, "at least 0")


def num_even_rows(config: RunConfig) -> int:
    """Return the rows that a rank's experts take in one layer if load is even.

    As many as its own tokens choose; each goes to all ranks that share an expert.
    """
    num_tokens = config.train.batch_size * config.data.seq_len
    return num_tokens * config.model.moe.top_k * config.expert_tp_size
