"""Training steps of Lancet's evaluation: GPT-2 with experts, simulated as RAF, Tutel and Lancet.

One rank is simulated: all have the same load. RAF runs one operation after another. Tutel overlaps
all-to-alls with experts, in chunks, forward and backward. Lancet runs weight-gradient GEMMs under
the all-to-alls of backward, and partitions forward: all-to-alls overlap experts, attention and the
dense network around them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean

from benchmarks.graph_bench.gpt2_moe import GPT2Shape, find_shape
from benchmarks.papers import paper_values as paper
from benchmarks.papers.paper_values import Value, make_values
from halley.core.timeline import exposed_us
from halley.core.types import Task
from halley.cost.hardware import A100, Hardware, Predictor
from halley.cost.simulate import simulate


GPUS_PER_NODE = 8
_ITEMSIZE = 4  # Lancet's published configurations have FP16=False
_TILE = 128  # rows and columns of a GEMM tile
_GAP_US = 10.0  # between two chunks of an operation: a launch in the virtual machine of RAF
_NETWORK_SHARE = 0.79  # of the line rate; fitted to all-to-all over expert time, 3.36 on V100

# A100: GEMMs in TF32, the default of PyTorch before 1.12, at 70 % of the data sheet's 156 TFLOP/s,
# as Halley's A100 in bfloat16. V100: 90 % of 15.7 TFLOP/s in FP32. Both: 80 % of the memory
# bandwidth. Eight GPUs share the network of a node, 400 Gb/s (p4de) and 100 Gb/s (p3dn).
HARDWARE: dict[str, Hardware] = {
    "A100": replace(
        A100,
        gemm_flops_per_s=110e12,
        memory_bytes_per_s=1.6e12,
        network_bytes_per_s=_NETWORK_SHARE * 6.25e9,
        link_latency_us=40.0,
        launch_us=5.0,
    ),
    "V100": replace(
        A100,
        name="NVIDIA V100",
        gemm_flops_per_s=14.1e12,
        memory_bytes_per_s=0.72e12,
        network_bytes_per_s=_NETWORK_SHARE * 1.5625e9,
        link_latency_us=40.0,
        launch_us=5.0,
    ),
}
NUM_SMS = {"A100": 108, "V100": 80}
BATCH_SIZES = {  # sequences of 512 tokens on each GPU, section 7
    ("gpt2-s-moe", "A100"): 24, ("gpt2-l-moe", "A100"): 48,
    ("gpt2-s-moe", "V100"): 16, ("gpt2-l-moe", "V100"): 8,
}  # fmt: skip
_NUM_CHUNKS = (1, 2, 4, 8)
# Lancet sends no padding. With capacity factor 1 and loads of experts that vary by 26 % (COMET: the
# mean standard deviation of shares in production is 0.032 with 8 experts), experts fill
# 1 - 0.26 / sqrt(2 pi) of their capacity.
_FILLED = 0.9
# Passes of element-wise operators over memory, forward: over (tokens, hidden) for norms, dropout
# and residual of an attention or a dense network, over its 4 times wider inner tensor for bias and
# GELU, and over the scores of attention. Backward reads and writes twice as much.
_NORM_PASSES, _GELU_PASSES, _SCORE_PASSES = 7, 4, 6


@dataclass(frozen=True, kw_only=True)
class Block:
    """Times in us of a part of the model."""

    forward: float
    input_gradient: float
    weight_gradients: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Simulated times of a training step."""

    step_us: float
    exposed_us: float  # all-to-alls that no computation overlaps


class StepModel:
    """Costs of a model on a number of GPUs of one kind."""

    def __init__(self, model: str, gpu: str, *, num_gpus: int, filled: float = 1.0) -> None:
        self.shape: GPT2Shape = find_shape(model)
        self.predictor = Predictor(HARDWARE[gpu])
        self.num_sms = NUM_SMS[gpu]
        self.num_tokens = BATCH_SIZES[model, gpu] * self.shape.seq_len
        between = (num_gpus - GPUS_PER_NODE) / num_gpus  # share of tokens that leave the node
        num_bytes = self.num_tokens * self.shape.hidden_size * _ITEMSIZE
        self._network_bytes = filled * between * num_bytes
        self.num_pairs = self.shape.num_layers // 2  # one dense block and one block with experts

    def all_to_all_us(self, share: float = 1.0) -> float:
        return self.predictor.network_us(share * self._network_bytes)

    def _gemm_us(self, rows: float, *, inner: int, outer: int) -> float:
        """Predict a GEMM from its waves of tiles, since a last wave leaves SMs idle."""
        rate = self.predictor.hardware.gemm_flops_per_s / self.num_sms
        waves = math.ceil(math.ceil(rows / _TILE) * math.ceil(outer / _TILE) / self.num_sms)
        return waves * 2.0 * _TILE * _TILE * inner / rate * 1e6

    def attention(self, share: float = 1.0) -> Block:
        rows, size, length = share * self.num_tokens, self.shape.hidden_size, self.shape.seq_len
        scores = rows * self.shape.num_heads * length * _ITEMSIZE
        core_s = 4.0 * rows * length * size / self.predictor.hardware.gemm_flops_per_s
        light_us = self.predictor.memory_us(
            _NORM_PASSES * rows * size * _ITEMSIZE + _SCORE_PASSES * scores
        )
        gemms = (
            self._gemm_us(rows, inner=size, outer=3 * size),
            self._gemm_us(rows, inner=size, outer=size),
        )
        return _block(gemms, core_s * 1e6 + light_us)

    def network(self, share: float = 1.0, *, num_experts: int = 1) -> Block:
        rows, size = share * self.num_tokens / num_experts, self.shape.hidden_size
        gemms = (
            self._gemm_us(rows, inner=size, outer=4 * size),
            self._gemm_us(rows, inner=4 * size, outer=size),
        ) * num_experts
        passes = _NORM_PASSES + 4 * _GELU_PASSES
        light_us = self.predictor.memory_us(passes * share * self.num_tokens * size * _ITEMSIZE)
        return _block(gemms, light_us)

    def experts(self, share: float = 1.0) -> Block:
        return self.network(share, num_experts=self.shape.experts_per_rank)

    def head(self) -> Block:
        shape = self.shape
        gemm_us = self._gemm_us(self.num_tokens, inner=shape.hidden_size, outer=shape.vocab_size)
        logits = self.num_tokens * shape.vocab_size * _ITEMSIZE
        return _block((gemm_us,), self.predictor.memory_us(2 * logits))


def _block(gemms: tuple[float, ...], light_us: float) -> Block:
    """Return a block whose backward has two GEMMs for each of forward, and twice the light work."""
    total_us = sum(gemms)
    return Block(
        forward=total_us + light_us,
        input_gradient=total_us + 2 * light_us,
        weight_gradients=gemms,
    )


def _add(tasks: list[Task], stream: str, duration_us: float, *needs: str) -> str:
    name = f"{len(tasks)}"
    tasks.append(Task(name=name, stream=stream, duration_us=duration_us, needs=needs))
    return name


def _add_pipeline(
    tasks: list[Task], stages: Sequence[tuple[str, float]], *, num_chunks: int
) -> None:
    """Add stages (stream, us of a chunk) in chunks: all chunks of a stage, then the next stage."""
    ends: list[tuple[str, ...]] = [(tasks[-1].name,)] * num_chunks
    gap_us = _GAP_US if num_chunks > 1 else 0.0
    for stream, duration_us in stages:
        ends = [(_add(tasks, stream, duration_us + gap_us, *end),) for end in ends]
    _add(tasks, "compute", 0.0, *(name for end in ends for name in end))  # waits for all chunks


def _forward(
    costs: StepModel, *, num_chunks: int, before: bool = False, num_after: int = 0
) -> list[Task]:
    """Return forward; pipelines have experts, and attention ``before`` and up to 2 blocks after."""
    tasks: list[Task] = []
    share = 1 / num_chunks
    attention_us = costs.attention().forward
    dense_block = (attention_us, costs.network().forward)
    parts = (costs.attention(share).forward, costs.network(share).forward)
    exchange = ("comm", costs.all_to_all_us(share))
    stages = [exchange, ("compute", costs.experts(share).forward), exchange]
    if before:
        stages.insert(0, ("compute", parts[0]))
    after = [("compute", part_us) for part_us in parts[:num_after]]
    for pair in range(costs.num_pairs):
        # The pipeline of the pair before has computed the first operators of the dense block.
        for duration_us in dense_block[num_after if pair else 0 :]:
            _add(tasks, "compute", duration_us)
        if not before:
            _add(tasks, "compute", attention_us)
        is_last = pair + 1 == costs.num_pairs
        _add_pipeline(tasks, stages if is_last else stages + after, num_chunks=num_chunks)
    _add(tasks, "compute", costs.head().forward)
    return tasks


def _add_backward(tasks: list[Task], costs: StepModel, *, num_chunks: int, moves: bool) -> None:
    """Add backward; with ``moves``, weight gradients run under all-to-alls by best fit."""
    attention, network, experts = costs.attention(), costs.network(), costs.experts()
    waiting: list[float] = []  # weight gradients that may run under an all-to-all

    def compute(block: Block) -> None:
        _add(tasks, "compute", block.input_gradient)
        waiting.extend(block.weight_gradients)
        if not moves:
            flush()

    def flush() -> None:
        _add(tasks, "compute", sum(waiting))
        waiting.clear()

    def exchange() -> None:
        name = _add(tasks, "comm", costs.all_to_all_us(), tasks[-1].name)
        for duration_us in _best_fit(waiting, costs.all_to_all_us()):
            _add(tasks, "compute", duration_us)
        _add(tasks, "compute", 0.0, name)

    compute(costs.head())
    for _ in range(costs.num_pairs):
        if num_chunks > 1:
            part = costs.experts(1 / num_chunks)
            part_us = part.input_gradient + sum(part.weight_gradients)
            comm = ("comm", costs.all_to_all_us(1 / num_chunks))
            _add_pipeline(tasks, [comm, ("compute", part_us), comm], num_chunks=num_chunks)
        else:
            exchange()
            compute(experts)
            exchange()
        for block in (attention, network, attention):
            compute(block)
    flush()


def _best_fit(waiting: list[float], left_us: float) -> list[float]:
    """Take durations from ``waiting`` for an all-to-all, the nearest to the unfilled time first.

    Source: Lancet, section 4. Its code takes no duration above twice the unfilled time after the
    first.
    """
    taken: list[float] = []
    while waiting and left_us > 0:
        best = min(waiting, key=lambda duration_us: abs(duration_us - left_us))
        if taken and best > 2 * left_us:
            break
        waiting.remove(best)
        taken.append(best)
        left_us -= best
    return taken


def step_times(model: str, gpu: str, *, num_gpus: int, gate: str) -> dict[str, StepTime]:
    """Simulate a step of RAF, Tutel and Lancet, the last two with their best partition.

    The gate "prioritized" sorts the whole batch, so Lancet partitions no operator before it.
    """

    costs, filled = (
        StepModel(model, gpu, num_gpus=num_gpus, filled=share) for share in (1.0, _FILLED)
    )

    def overlap_experts(num_chunks: int) -> StepTime:
        tasks = _forward(costs, num_chunks=num_chunks)
        _add_backward(tasks, costs, num_chunks=num_chunks, moves=False)
        return _simulate(tasks)

    def lancet(num_chunks: int, before: bool, num_after: int) -> StepTime:
        tasks = _forward(filled, num_chunks=num_chunks, before=before, num_after=num_after)
        _add_backward(tasks, filled, num_chunks=1, moves=True)
        return _simulate(tasks)

    def fastest(times: list[StepTime]) -> StepTime:
        return min(times, key=lambda each: each.step_us)

    ranges = product(_NUM_CHUNKS, (False, True) if gate == "switch" else (False,), (0, 1, 2))
    return {
        "RAF": overlap_experts(1),
        "Tutel": fastest([overlap_experts(num_chunks) for num_chunks in _NUM_CHUNKS]),
        "Lancet": fastest([lancet(*each) for each in ranges]),
    }


def _simulate(tasks: list[Task]) -> StepTime:
    spans = simulate(tasks)
    comm = [span for span in spans if span.stream == "comm"]
    compute = [span for span in spans if span.stream == "compute"]
    return StepTime(
        step_us=max(span.end_us for span in spans), exposed_us=exposed_us(comm, compute)
    )


def all_values() -> list[Value]:
    """Simulate Lancet's figures 11 to 13: each GPU and gate, both models, 16 to 64 GPUs."""
    steps = {
        (gate, gpu): [
            step_times(model, gpu, num_gpus=num_gpus, gate=gate)
            for model in ("gpt2-s-moe", "gpt2-l-moe")
            for num_gpus in (16, 32, 64)
        ]
        for gate, gpu in paper.LANCET_SPEEDUP
    }
    costs = StepModel("gpt2-s-moe", "V100", num_gpus=64)
    experts = costs.experts()
    experts_us = experts.forward + experts.input_gradient + sum(experts.weight_gradients)
    ratio = 4 * costs.all_to_all_us() / experts_us  # of a step
    speedups = {
        key: [min(t["RAF"].step_us, t["Tutel"].step_us) / t["Lancet"].step_us for t in times]
        for key, times in steps.items()
    }
    exposed = {
        (name, gpu): [1 - t["Lancet"].exposed_us / t[name].exposed_us for t in steps["switch", gpu]]
        for name, gpu in paper.LANCET_REDUCTION
    }
    return [
        *make_values(
            "Lancet section 2.2 (all-to-alls over experts in a step)",
            [("most on V100", "RAF", paper.LANCET_COMM_OVER_EXPERTS, ratio)],
            fitted=("most on V100",),
        ),
        *make_values(
            "Lancet figures 11 and 12 (speed-up)",
            [
                (f"{name}, {gate}, {gpu}", "Lancet", published, value)
                for (gate, gpu), both in paper.LANCET_SPEEDUP.items()
                for name, published, value in zip(
                    ("average", "most"),
                    both,
                    (mean(speedups[gate, gpu]), max(speedups[gate, gpu])),
                    strict=True,
                )
            ],
        ),
        *make_values(
            "Lancet figure 13 (largest reduction of exposed communication, %)",
            [
                (f"{name}, {gpu}", "Lancet", published, 100 * max(exposed[name, gpu]))
                for (name, gpu), published in paper.LANCET_REDUCTION.items()
            ],
        ),
    ]
