"""A two-layer Megatron-Core model that trains on CPU ranks, with and without Halley."""

import contextlib
import gc
import importlib
import multiprocessing
import queue
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist


_REASON = "megatron-core is not installed: make compat runs these tests with it"


def _core(name: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # Megatron warns of missing optional packages
        return pytest.importorskip(f"megatron.core.{name}", reason=_REASON)


parallel_state, specs = _core("parallel_state"), _core("models.gpt.gpt_layer_specs")
moe_layer, moe_utils = _core("transformer.moe.moe_layer"), _core("transformer.moe.moe_utils")
transformer, gpt = _core("transformer"), _core("models.gpt")
distributed, tensor_parallel = _core("distributed"), _core("tensor_parallel")
checkpointing = _core("dist_checkpointing")
writers = _core("dist_checkpointing.strategies.filesystem_async")
dispatchers = _core("transformer.moe.token_dispatcher")
halley_megatron: Any = importlib.import_module("halley.integrations.megatron")

NUM_EXPERTS, VOCABULARY, SEQ_LEN, BATCH, EP_SIZE = 8, 64, 16, 2, 2
PARALLEL_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained.

    The schedule "batch overlap" runs the communication of one batch under the computation of
    another. With ``fusion``, kernels add weight gradients to Megatron's buffers, and Megatron
    reduces full buffers over ranks while backward still runs.
    """

    strategy: str = ""  # of Halley; "" for Megatron's own layer
    schedule: str = "plain"
    settings: dict[str, Any] = field(default_factory=dict)  # of Megatron's configuration
    fusion: bool = False
    num_ranks: int = 2
    num_steps: int = 4


class _NoStream:
    """Stands in for a CUDA stream or event; every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Patch Megatron-Core so that it runs on a CPU."""

    @contextlib.contextmanager
    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    def splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    cuda = {
        "current_device": lambda: torch.device("cpu"),
        "Stream": _NoStream,  # a class, because annotations use it
        "Event": _NoStream,
        "current_stream": lambda *args, **kwargs: _NoStream(),
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "stream": nothing,
        "nvtx": SimpleNamespace(range_push=str, range_pop=str, range=nothing),
    }
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core 0.16 uses names that torch 2.13 deprecates
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        # Megatron-Core 0.16 writes checkpoints in child processes, which daemons such as test ranks
        # may not start. The queue of the results would start a server process that outlives the
        # rank. Only this process puts results into it. Versions since 0.17 name it otherwise.
        patch.setitem(vars(multiprocessing.current_process())["_config"], "daemon", False)
        for name in ("_get_write_results_queue", "get_write_results_queue"):
            patch.setattr(writers, name, queue.Queue, raising=False)
        # Without Transformer Engine the router reads this undefined name.
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        for module in (moe_utils, dispatchers):
            patch.setattr(module, "maybe_move_tensor_to_cpu", splits, raising=False)
        patch.setattr(tensor_parallel.random.CudaRNGStatesTracker, "fork", nothing)
        patch.setattr(torch.Tensor, "record_stream", lambda *args: None)
        yield


def forget_groups() -> None:
    """Make Megatron forget the groups of earlier calls, which the pool of ranks has destroyed."""
    parallel_state.destroy_model_parallel()
    gc.collect()  # models in reference cycles have the groups, whose threads run until then


def start(num_ranks: int, **settings: Any) -> None:
    """Create Megatron's process groups, by default expert-parallel ones of at most two ranks."""
    sizes = {"expert_model_parallel_size": min(num_ranks, EP_SIZE)}
    sizes |= {name: value for name, value in settings.items() if name in PARALLEL_SIZES}
    forget_groups()
    parallel_state.initialize_model_parallel(**sizes)


def make_config(num_ranks: int, **settings: Any) -> Any:
    """Return Megatron's configuration of a model."""
    return transformer.TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_moe_experts": NUM_EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "ffn_hidden_size": 24,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": min(num_ranks, EP_SIZE),
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "bias_activation_fusion": False,
            "normalization": "RMSNorm",
            "use_cpu_initialization": True,
            "init_method_std": 0.2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **settings,
        }
    )


def make_spec() -> Any:
    """Return Megatron's spec of a layer."""
    return specs.get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, normalization="RMSNorm")


def class_and_options(spec: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class of a layer's MLP or MoE layer in a spec, and the arguments set for it."""
    mlp = spec.submodules.mlp  # a partial since Megatron-Core 0.18
    return (mlp.func, mlp.keywords) if isinstance(mlp, partial) else (mlp.module, mlp.params)


def build_model(case: Case, num_ranks: int, *, strict: bool = True) -> Any:
    """Return a model in Megatron's data parallelism, as its training loop builds it."""
    start(num_ranks, **case.settings)
    config = make_config(num_ranks, **case.settings)
    # Set after the checks: Megatron allows it in bfloat16 only, whose rounding hides differences.
    config.overlap_moe_expert_parallel_comm = case.schedule == "batch overlap"
    spec = make_spec()
    if case.strategy:
        spec = halley_megatron.enable(spec, strategy=case.strategy, strict=strict)
    torch.manual_seed(0)
    model = gpt.GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LEN,
    )
    # Set after the build: Megatron's own linear layers would need a kernel of apex.
    config.gradient_accumulation_fusion = case.fusion
    reduce = distributed.DistributedDataParallelConfig(overlap_grad_reduce=case.fusion)
    return distributed.DistributedDataParallel(config, reduce, model)


def experts_of(
    model: Any, read: Callable[[Any], torch.Tensor] = torch.Tensor.detach
) -> list[torch.Tensor]:
    """Return the stacked expert weights of Halley's or Megatron's layers, or their gradients."""
    stacks: list[torch.Tensor] = []
    for layer in model.module.decoder.layers:
        experts = layer.mlp.experts
        if hasattr(experts, "weight1"):
            stacks += [read(experts.weight1), read(experts.weight2)]
            continue
        for part in ("linear_fc1", "linear_fc2"):
            weights = [read(getattr(expert, part).weight) for expert in experts.local_experts]
            stacks.append(torch.stack(weights))
    return stacks


def train(rank: int, num_ranks: int, case: Case, num_steps: int) -> tuple[list[float], Any]:
    """Train on random tokens; return the mean loss of each step, and the descriptions."""
    with on_cpu():
        model = build_model(case, num_ranks)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        generator = torch.Generator().manual_seed(rank)
        losses: list[float] = []
        for _ in range(num_steps):
            model.zero_grad_buffer()
            tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ_LEN + 1), generator=generator)
            losses.append(run_step(model, tokens, case.schedule))
            model.finish_grad_sync()
            for parameter in parameters:
                parameter.grad = parameter.main_grad.to(parameter.dtype)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
        return losses, halley_megatron.describe(model.module)


def run_step(model: Any, tokens: torch.Tensor, schedule: str) -> float:
    """Run forward and backward of two batches; return the mean loss over all ranks."""
    batches = [_inputs(part) for part in tokens.chunk(2)]
    losses: list[torch.Tensor] = []
    if schedule == "plain":
        for arguments, labels in batches:
            loss = model(*arguments, labels=labels).mean() / 2
            loss.backward()
            losses.append(loss.detach())
    else:
        previous: Any = None
        gradient: Any = None
        for arguments, labels in batches:  # a forward runs with the previous backward
            plan = model.module.build_schedule_plan(*arguments, labels=labels)
            output = type(plan).run(plan, previous, b_grad=gradient)
            losses.append(output.detach().mean() / 2)
            previous, gradient = plan, torch.full_like(output, 0.5 / output.numel())
        type(previous).run(None, previous, b_grad=gradient)
    total = sum(losses, torch.zeros(()))
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _inputs(tokens: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the token ids, positions and attention mask of a batch, then its labels."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQ_LEN).expand(inputs.shape)
    return (inputs, positions, torch.ones(1, 1, SEQ_LEN, SEQ_LEN).triu(1).bool()), labels
