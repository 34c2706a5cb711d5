"""A job: one torchrun of a framework, from its JSON argument to the JSON of its measurements."""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from halley.core.config import ModelConfig
from halley.core.models import find_model
from halley.distributed.mesh import build_groups
from halley.tools.timer import machine_keys


# The loss of this step is compared. Later, losses of random models drift apart by rounding: for
# Mixtral-8x7B in bfloat16, those of all variants differ by 10 to 50 % at step 10.
CHECKED_STEP = 3
NUM_WARMUP = 10
# With the usual 0.02, all tokens of a random model have nearly equal hidden states and equal
# experts: the fullest expert of Qwen3 gets up to 16 times the mean, and with 1.0 up to 4 times.
EMBEDDING_STD = 1.0
# A rate of the start of a warm-up. With 3e-4 from the first step, random routers soon send most
# rows to one rank, and the routers of the variants then send different rows.
LEARNING_RATE = 3e-6
_NUM_IDS, _RUN = 1024, 64  # token ids that occur, and the length of a run of consecutive ids


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run experts: ``experts`` names it, "halley" or a form of the framework.

    ``checkpointing`` is torchtitan's activation checkpointing: "selective", "full" or "none". With
    ``cuda_graphs``, forward and backward are one CUDA graph; Halley's buffers have ``max_load``.
    """

    experts: str
    compiled: bool = True
    checkpointing: str = "none"
    cuda_graphs: bool = False
    max_load: float = 0.0
    overrides: tuple[str, ...] = ()  # further values of torchtitan's ``--override.imports``


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model and variants that a job measures, and the file of its result.

    Transformers measures all variants in one job, torchtitan one.
    """

    model: str
    num_layers: int
    variants: dict[str, Variant]
    output: str
    strategy: str = "fused"
    seq_len: int = 4096
    batch_size: int = 1
    num_samples: int = 11
    on_cpu: bool = False
    tiny: bool = False
    commit: str | None = None

    def config(self) -> ModelConfig:
        """Return the model with fewer layers, and a vocabulary in the same proportion."""
        if self.tiny:
            tiny = find_model("tiny")
            moe = dataclasses.replace(tiny.moe, num_experts=4, intermediate_size=64)
            sizes = {"hidden_size": 64, "head_dim": 16, "num_layers": 1, "vocab_size": 2048}
            return dataclasses.replace(tiny, moe=moe, **sizes)
        model = find_model(self.model)
        vocab_size = max(model.vocab_size * self.num_layers // model.num_layers, 2 * _NUM_IDS)
        vocab_size = -(-vocab_size // 128) * 128
        return dataclasses.replace(model, num_layers=self.num_layers, vocab_size=vocab_size)

    def tokens(self, rank: int, step: int) -> torch.Tensor:
        """Return token ids of a rank and a step, ``(batch_size, seq_len + 1)``."""
        generator = torch.Generator().manual_seed(1_000_003 * rank + step)
        num_runs = self.seq_len // _RUN + 1
        begin = torch.randint(_NUM_IDS, (self.batch_size, num_runs, 1), generator=generator)
        ids = (begin + torch.arange(_RUN)) % _NUM_IDS
        return ids.flatten(1)[:, : self.seq_len + 1].contiguous()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a variant: all ranks' maximum, except for losses, which are means.

    Memory is that of steps that a CUDA graph replays, or of the same steps without a graph.
    ``peak_mib`` is the peak of the memory of tensors, with all memory of the pools of CUDA graphs.
    ``used_mib`` is the used memory of the GPU at the end of a step, before which torch's cache was
    emptied; None if the job has several variants.
    """

    samples_us: list[float]
    losses: list[float]  # of the first ``CHECKED_STEP`` steps
    gradient_norm: float  # of the experts in the last of these steps, which CUDA graphs replay
    peak_mib: float | None
    used_mib: float | None
    ran: str  # how Halley says that it ran the experts


def run_job(measure: Callable[[Job], dict[str, Measured]], version: str) -> None:
    """Run the job of the command line; write its measurements and machine on the first rank."""
    fields = json.loads(sys.argv[1])
    given = {name: Variant(**each) for name, each in fields.pop("variants").items()}
    job = Job(**fields, variants=given)
    found = measure(job)
    device = torch.device("cpu" if job.on_cpu else f"cuda:{torch.cuda.current_device()}")
    groups = build_groups(0, device_type=device.type)
    machine = machine_keys(groups, device=device, commit=job.commit)
    if dist.get_rank() == 0:
        machine |= {"framework_version": version, "ep_size": dist.get_world_size()}
        variants = {name: dataclasses.asdict(each) for name, each in found.items()}
        text = json.dumps({"machine": machine, "variants": variants})
        Path(job.output).write_text(text, encoding="ascii")
    dist.barrier()  # ranks that are still joining groups need this one
    dist.destroy_process_group()


def expert_gradient_norm(model: torch.nn.Module, words: str) -> float:
    """Return the norm of the gradients of parameters whose name has ``words``; a collective.

    It makes no copies of gradients, which would raise the peak of memory.
    """
    grads = [p.grad for name, p in model.named_parameters() if words in name]
    local = [getattr(grad, "_local_tensor", grad) for grad in grads]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in local if g is not None]
    total = torch.stack(norms).square().sum()
    dist.all_reduce(total)
    return float(total.sqrt())
