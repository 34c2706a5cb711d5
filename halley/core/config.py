"""The configuration of a run, as frozen dataclasses that check their fields when created."""

from dataclasses import dataclass
from typing import Literal

from halley.core.types import MAX_EXPERTS, Activation
from halley.core.validation import check_fields, show_name


_MAX_SIZE = 2**31 - 1  # kernels and dispatch plans index rows with 32-bit integers
_MAX_SEED = 2**63 - 1  # largest signed 64-bit integer


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} ({show_name(value)}) must be {rule}")


def _require_sizes(config: object, *names: str, least: int = 1, prefix: str = "") -> None:
    for name in names:
        size: int = getattr(config, name)
        _require(size >= least, prefix + name, size, f"at least {least}")
        _require(size <= _MAX_SIZE, prefix + name, size, f"at most {_MAX_SIZE}")


def _require_positive(config: object, *names: str, prefix: str = "", or_zero: bool = False) -> None:
    for name in names:
        value: float = getattr(config, name)
        is_allowed = value >= 0 if or_zero else value > 0
        _require(is_allowed, prefix + name, value, "at least 0" if or_zero else "above 0")


def _require_between(config: object, name: str, low: int, high: int, *, high_name: str) -> None:
    value: int = getattr(config, name)
    _require(low <= value <= high, name, value, f"between {low} and {high_name} ({high})")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How the router of an MoE layer chooses the experts of a token, and the router's losses.

    Attributes:
        kind: "softmax" (Mixtral, Qwen), "sigmoid" (DeepSeek-V3: groups and a selection bias),
            "switch" (top-1 with capacity) or "top2" (GShard, with capacity).
        normalize: divide the weights of a token's experts by their sum, for softmax and sigmoid.
            switch never does this, top2 always.
        capacity_factor: an expert accepts at most ``capacity_factor * T * K / E`` slots of a rank's
            microbatch, and further slots are dropped; 0 drops none.
        priority: which slots an expert with a capacity accepts first: slots of earlier tokens
            ("order"), or slots with a larger weight ("weight", batch prioritized routing).
        num_groups, num_limited_groups: sigmoid only. Experts are chosen from the best
            ``num_limited_groups`` of ``num_groups`` groups.
        scaling_factor: sigmoid only; multiplies the weights.
        bias_update_rate: sigmoid only; change of the selection bias after each training step.
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
        check_fields(self)
        names = ("capacity_factor", "bias_update_rate", "balance_coefficient", "z_coefficient")
        _require_positive(self, *names, or_zero=True)
        _require_positive(self, "scaling_factor")
        factor = self.capacity_factor
        if self.priority == "weight":
            _require(factor > 0, "capacity_factor", factor, "above 0 for priority weight")
        _require_sizes(self, "num_groups")
        _require_between(self, "num_limited_groups", 1, self.num_groups, high_name="num_groups")
        if self.kind in ("switch", "top2"):
            _require(factor > 0, "capacity_factor", factor, f"above 0 for the {self.kind} router")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The configuration of one MoE layer, without the hidden size, which ``ModelConfig`` has."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert, F
    activation: Activation = "swiglu"
    expert_bias: bool = False  # whether experts have biases, as in GPT-OSS
    shared_intermediate_size: int = 0  # of all shared experts together; 0 for none
    shared_gate: bool = False  # multiply the shared experts' output by a sigmoid gate (Qwen2-MoE)
    router: RouterConfig = RouterConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        _require_sizes(self, "num_experts", "intermediate_size")
        _require_sizes(self, "shared_intermediate_size", least=0)
        rule = f"at most {MAX_EXPERTS}, the largest expert id that slots are sorted by"
        _require(self.num_experts <= MAX_EXPERTS, "num_experts", self.num_experts, rule)
        _require_between(self, "top_k", 1, self.num_experts, high_name="num_experts")
        num_groups = self.router.num_groups
        rule = f"divisible by num_groups ({num_groups})"
        _require(self.num_experts % num_groups == 0, "num_experts", self.num_experts, rule)
        allowed = self.num_experts // num_groups * self.router.num_limited_groups
        rule = f"at most the experts of num_limited_groups groups ({allowed})"
        _require(self.top_k <= allowed, "top_k", self.top_k, rule)
        # The routers "switch" and "top2", as published, fix the number of experts of a token.
        wanted = {"switch": 1, "top2": 2}.get(self.router.kind, self.top_k)
        _require(self.top_k == wanted, "top_k", self.top_k, f"{wanted} for {self.router.kind}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes and variants of a decoder-only MoE transformer.

    Attributes:
        moe_interval: after ``num_dense_layers`` dense layers, every ``moe_interval``-th layer is an
            MoE layer; with 1, all are.
        qk_norm: RMSNorm of queries and keys: per "head" (Qwen3), over all heads ("full", OLMoE)
            or "none".
        hf_family: the Hugging Face architecture with the same equations, or "" if there is none.
            Export needs one.
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
        check_fields(self)
        names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads")
        _require_sizes(self, *names, "moe_interval")
        _require_sizes(self, "dense_intermediate_size", least=0)
        rule = f"divisible by num_kv_heads ({self.num_kv_heads})"
        _require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, rule)
        size = self.head_dim  # even, because rotary embeddings rotate pairs of dimensions
        _require(size >= 2 and size % 2 == 0, "head_dim", size, "even, >= 2")
        _require_sizes(self, "head_dim")
        _require_positive(self, "rope_theta", "norm_eps")
        _require_between(self, "num_dense_layers", 0, self.num_layers, high_name="num_layers")
        if self.num_moe_layers < self.num_layers:
            size = self.dense_intermediate_size
            _require(size >= 1, "dense_intermediate_size", size, "at least 1 for dense layers")

    def is_moe_layer(self, index: int) -> bool:
        """Return whether layer ``index``, counted from 0, is an MoE layer and not a dense one."""
        index_after_dense = index - self.num_dense_layers
        return index_after_dense >= 0 and (index_after_dense + 1) % self.moe_interval == 0

    @property
    def num_moe_layers(self) -> int:
        return (self.num_layers - self.num_dense_layers) // self.moe_interval


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text of a run, its tokenizer, and the text and times of evaluations.

    Attributes:
        path: a file or a folder: plain text, ``.jsonl`` files with the key "text", ``.parquet``
            files with the column "text", or the folder that ``halley tokenize`` wrote. None for the
            source code of Python's standard library.
        tokenizer: a ``tokenizer.json`` of the library tokenizers, or a folder that contains one; ""
            for one token per byte, or for the tokens of ``halley tokenize``.
        eval_path: text for the evaluation loss, in the formats of ``path``; "" for none.
    """

    path: str | None = None
    seq_len: int = 256  # tokens per sequence
    tokenizer: str = ""
    eval_path: str = ""
    eval_every: int = 100  # steps between evaluations; the last step of a run evaluates too
    eval_batches: int = 16  # most batches of each rank in an evaluation

    def __post_init__(self) -> None:
        check_fields(self, prefix="data.")
        _require(self.path != "", "data.path", self.path, "a file or a folder, or left out")
        _require_sizes(self, "seq_len", "eval_every", "eval_batches", prefix="data.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options of AdamW or plain SGD, with linear warm-up and cosine decay of the learning rate."""

    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 20  # steps over which the learning rate rises from 0
    final_fraction: float = 0.1  # learning rate after the decay, as a fraction of ``learning_rate``
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0  # gradients with a larger global norm are scaled to this norm; 0: never

    def __post_init__(self) -> None:
        check_fields(self, prefix="optimizer.")
        _require_positive(self, "learning_rate", "eps", prefix="optimizer.")
        names = ("warmup_steps", "weight_decay", "clip_norm", "final_fraction")
        _require_positive(self, *names, prefix="optimizer.", or_zero=True)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}", value, "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batch sizes, number of steps, dtype and other settings of the training loop.

    Attributes:
        dtype: dtype of parameters and activations; the optimizer state is always float32.
        activation_checkpointing: save only each layer's input and recompute the layer in backward,
            its communication included.
        deterministic: give the same bits in every run. On GPUs this selects a slower kernel for
            the gradient of attention, because the usual one adds in varying order.
    """

    num_steps: int = 300
    batch_size: int = 8  # sequences in one rank's microbatch
    num_microbatches: int = 1  # microbatches whose gradients are accumulated per step
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    activation_checkpointing: bool = False
    deterministic: bool = False
    log_every: int = 10  # steps between log lines where stderr is not a terminal
    tensorboard: bool = False  # write TensorBoard events to <output>/tensorboard
    wandb: bool = False  # log to Weights & Biases, with its files in <output>/wandb

    def __post_init__(self) -> None:
        check_fields(self, prefix="train.")
        names = ("num_steps", "batch_size", "num_microbatches", "log_every")
        _require_sizes(self, *names, prefix="train.")
        _require(self.seed >= 0, "train.seed", self.seed, "at least 0")
        _require(self.seed <= _MAX_SEED, "train.seed", self.seed, f"at most {_MAX_SEED}")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run writes checkpoints, how many it keeps, and whether it resumes from the newest one.

    A run writes to ``<output>/checkpoints``, also when it ends, by itself or by SIGINT or SIGTERM.
    """

    every_minutes: float = 10.0  # minutes between checkpoints; 0 turns this off
    every_steps: int = 0  # steps between checkpoints; 0 turns this off
    keep: int = 2  # number of newest complete checkpoints to keep
    resume: bool = True  # from the newest checkpoint; if false, existing checkpoints are an error

    def __post_init__(self) -> None:
        check_fields(self, prefix="checkpoint.")
        _require_positive(self, "every_minutes", prefix="checkpoint.", or_zero=True)
        _require_sizes(self, "every_steps", least=0, prefix="checkpoint.")
        _require_sizes(self, "keep", prefix="checkpoint.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The complete configuration of a training run.

    Attributes:
        output: folder for metrics, checkpoints and exports.
        strategy: how routed experts run: a name of ``halley.strategies.registry``; one name per MoE
            layer, separated by commas; or "planned" for the strategies predicted to be fastest.
        passes: graph passes of ``halley.compiler`` on the compiled model. All but "none" need
            strategies that a graph can contain: "functional", "unfused", "fused".
        profiles: file of measured times, which the passes use; ranks add missing times.
            "auto" is a file in the user's cache folder on GPUs, and no file on CPUs. With "", all
            times are predicted.
        num_chunks: chunks of the chunked strategy; 0 lets the cost model choose.
        max_load: buffer size of the fused strategy as a multiple of a balanced load, so that the
            host need not read counts from the device. 0 allows any load.
        ep_size: ranks over which the experts are distributed; 0 for all ranks.
        expert_tp_size: ranks that share each expert by its intermediate size (tensor parallelism).
        placement: file of ``halley plan balance``; "" for contiguous ranges of experts.
        device: "auto" is CUDA if there is a CUDA device.
    """

    model: ModelConfig
    output: str = "runs/halley"
    strategy: str = "sequential"
    passes: Literal["none", "wgrad"] = "none"
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
        check_fields(self)
        _require_sizes(self, "ep_size", "num_chunks", least=0)
        _require_sizes(self, "expert_tp_size")
        load = self.max_load
        _require(load == 0 or load >= 1, "max_load", load, "0 or at least 1")
        num_experts, tp_size = self.model.moe.num_experts, self.expert_tp_size
        rule = f"at most {MAX_EXPERTS // num_experts} for model.moe.num_experts ({num_experts})"
        _require(num_experts * tp_size <= MAX_EXPERTS, "expert_tp_size", tp_size, rule)
        num_rows = num_even_rows(self)  # kernels index these rows with 32-bit integers
        name = "train.batch_size * data.seq_len * model.moe.top_k * expert_tp_size"
        _require(num_rows <= _MAX_SIZE, name, num_rows, f"at most {_MAX_SIZE}")


def num_even_rows(config: RunConfig) -> int:
    """Return how many rows a rank's experts receive per microbatch in a layer with balanced load.

    The rank sends as many rows: ``top_k * expert_tp_size`` for each token.
    """
    num_tokens = config.train.batch_size * config.data.seq_len
    return num_tokens * config.model.moe.top_k * config.expert_tp_size
