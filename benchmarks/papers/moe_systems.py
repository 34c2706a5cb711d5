"""MoE systems of COMET's evaluation, each described by the tasks of one forward layer.

A task runs on a stream of one rank: "host" launches, "compute" and "comm" execute. All ranks have
the same load, so one rank is simulated; with an uneven load it is the rank with most tokens. The
time of a layer is the period of a sequence of layers, in which the host may run ahead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from halley.core.timeline import exposed_us
from halley.core.types import Task
from halley.cost.hardware import H100, Hardware, Predictor
from halley.cost.simulate import simulate


NUM_RANKS = 8
_ITEMSIZE = 2  # bfloat16


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host with eight GPUs, and the constants of kernels and collectives on it."""

    hardware: Hardware  # gemm_flops_per_s is that of dense GEMMs
    copy_bytes_per_s: float  # out of a GPU, by copy engines or by the CTAs of a kernel


# Sources. H800: dense GEMMs and NCCL all-gathers from the performance report of Flux (4096 x 12288
# by 12288 x 6144 takes 0.846 ms; 100.7 MB take 0.583 ms, 7/8 of it over the link). Copies reach
# 90 % of NVLink's 200 GB/s per direction. Memory and kernel gaps are those of Halley's H100.
# L20: dense GEMMs from the same report (5.746 ms), the link from COMET (25 GB/s), 87 % of the data
# sheet's 864 GB/s for memory, as on the H100.
H800 = Machine(
    hardware=replace(
        H100,
        name="NVIDIA H800",
        gemm_flops_per_s=731e12,
        memory_bytes_per_s=3.0e12,
        link_bytes_per_s=151e9,
        link_latency_us=40.0,
        launch_us=3.0,
        kernel_us=3.0,
        num_sms=132,
    ),
    copy_bytes_per_s=180e9,
)
L20 = Machine(
    hardware=replace(
        H800.hardware,
        name="NVIDIA L20",
        gemm_flops_per_s=108e12,
        memory_bytes_per_s=0.75e12,
        link_bytes_per_s=25e9,
        num_sms=92,
    ),
    copy_bytes_per_s=25e9,
)


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Host microseconds of one MoE layer of a system."""

    before: float  # until the launch of the dispatch; after it the host reads the counts, if at all
    after: float = 0.0  # from the read until the launch of the experts
    expert: float = 0.0  # for each local expert, after the read


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the systems, fitted to the ``CALIBRATION`` cells of ``layer_figures``."""

    gemm_share: float  # rate of grouped GEMMs over that of dense GEMMs
    host_us: Mapping[str, HostTime]


FITTED = Constants(
    gemm_share=0.72,
    host_us={
        "Megatron-TE": HostTime(before=1300.0, after=1390.0, expert=37.0),
        "Megatron-Cutlass": HostTime(before=1300.0, after=850.0, expert=14.0),
        "FasterMoE": HostTime(before=1300.0, after=1380.0, expert=650.0),
        "Tutel": HostTime(before=1300.0, after=970.0, expert=86.0),
        "COMET": HostTime(before=1080.0),
    },
)
# Not fitted. Host time to launch a chunk: about 12 launches of 6 us, as in Halley's H100.
# FasterMoE splits tokens in two, Tutel takes the best of four numbers of chunks.
_CHUNK_US = 72.0
_NUM_CHUNKS = {"FasterMoE": (2,), "Tutel": (1, 2, 4, 8)}
# Rate of one communication CTA. With it, 26 CTAs are best for TP 8 and M 16384 (figure 8).
_CTA_BYTES_PER_S = 4.0e9
_NUM_COLUMN_CHUNKS = 8  # of the second GEMM; from the source of Flux
_COMM_CTAS = tuple(range(2, 65, 4))
_NUM_LAYERS = 6  # in the simulated sequence


@dataclass(frozen=True, kw_only=True)
class Case:
    """The load of one forward layer on eight ranks."""

    num_tokens: int  # tokens of a rank before dispatch
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    tp_size: int = 1
    skew: float = 1.0  # tokens of the busiest expert over the mean
    # Host and device time of everything before the layer in a model; 0 for a layer alone.
    attention_host_us: float = 0.0
    attention_us: float = 0.0

    @property
    def ep_size(self) -> int:
        return NUM_RANKS // self.tp_size

    @property
    def num_local(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def num_rows(self) -> float:
        """Rows that a rank computes."""
        return self.num_tokens * self.tp_size * self.top_k * self.skew

    @property
    def token_bytes(self) -> float:
        return self.hidden_size * _ITEMSIZE

    @property
    def all_gather_bytes(self) -> float:
        """Bytes that an all-gather of all tokens brings to each rank."""
        return (NUM_RANKS - 1) * self.num_tokens * self.token_bytes

    @property
    def row_bytes(self) -> float:
        """Bytes of an all-to-all of rows in the EP group and an all-gather in the TP group."""
        return (1 - 1 / NUM_RANKS) * self.num_rows * self.token_bytes

    @property
    def partial_sum_bytes(self) -> float:
        """Bytes of partial sums that a rank returns, one for each token with an expert on it."""
        others = self.num_experts - self.num_local
        none = math.comb(others, self.top_k) / math.comb(self.num_experts, self.top_k)
        return (1 - none) * self.skew * self.all_gather_bytes


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Simulated time of one layer, and the share of its communication that runs under GEMMs."""

    time_us: float
    hidden_share: float
    choice: int  # number of chunks, or of communication CTAs


def layer_time(
    system: str, case: Case, *, machine: Machine = H800, constants: Constants = FITTED
) -> LayerTime:
    """Simulate one forward layer of a system, with its best number of chunks or CTAs."""
    host = constants.host_us[system]
    if system == "COMET":
        choices, build = _COMM_CTAS, _comet_layer
    elif system in _NUM_CHUNKS:  # FasterMoE and Tutel ran with EP 8 in all layouts
        choices, build, case = _NUM_CHUNKS[system], _chunked_layer, replace(case, tp_size=1)
    else:
        choices, build = (1,), _megatron_layer
    times = []
    for number in choices:
        parts = number if build is _chunked_layer else 1
        costs = _find_costs(case, machine, share=constants.gemm_share, parts=parts)
        times.append(_period(build(case, costs, host, number=number), choice=number))
    return min(times, key=lambda each: each.time_us)


def _period(layer: list[Task], *, choice: int) -> LayerTime:
    """Return the time of a layer in a sequence of equal layers, and what its last one hides.

    A task that needs "previous.NAME" needs the task NAME of the layer before.
    """
    tasks: list[Task] = []
    for at in range(_NUM_LAYERS):
        prefixes = {True: f"{at - 1}.", False: f"{at}."}
        for task in layer:
            needs = tuple(
                prefixes[name.startswith("previous.")] + name.removeprefix("previous.")
                for name in task.needs
                if at > 0 or not name.startswith("previous.")
            )
            tasks.append(replace(task, name=f"{at}.{task.name}", needs=needs))
    spans = simulate(tasks)
    half_us, end_us = (
        max(span.end_us for span in spans[: len(layer) * count])
        for count in (_NUM_LAYERS // 2, _NUM_LAYERS)
    )
    last = spans[-len(layer) :]
    comm = [span for span in last if span.stream == "comm"]
    compute = [span for span in last if span.stream == "compute"]
    return LayerTime(
        time_us=(end_us - half_us) / (_NUM_LAYERS - _NUM_LAYERS // 2),
        hidden_share=1 - exposed_us(comm, compute) / sum(span.duration_us for span in comm),
        choice=choice,
    )


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Times in us of the operations of a layer, each for all of its rows."""

    gemm_us: float  # each of the two grouped GEMMs
    activation_us: float
    permute_us: float  # gather of the rows that a rank sends
    sort_us: float  # order of received rows by local expert; 0 for one local expert
    reduce_us: float  # weighted sum of the rows of each token
    machine: Machine

    @property
    def experts_us(self) -> float:
        return 2 * self.gemm_us + self.activation_us + 2 * self.sort_us

    def all_to_all_us(self, num_bytes: float) -> float:
        return Predictor(self.machine.hardware).all_to_all_us(num_bytes)


def _find_costs(case: Case, machine: Machine, *, share: float, parts: int = 1) -> _Costs:
    """Return the costs of one of ``parts`` equal chunks of the tokens."""
    hardware, predictor = machine.hardware, Predictor(machine.hardware)
    rows, size = case.num_rows / parts, case.hidden_size
    width = case.intermediate_size // case.tp_size
    # A roofline that is independent of Halley's predictions, which are fitted to other machines.
    compute_s = 2.0 * rows * size * width / (share * hardware.gemm_flops_per_s)
    num_bytes = _ITEMSIZE * (rows * (size + width) + case.num_local * size * width)
    gemm_s = max(compute_s, num_bytes / hardware.memory_bytes_per_s)
    return _Costs(
        gemm_us=gemm_s * 1e6 + hardware.kernel_us,
        activation_us=predictor.memory_us(2 * rows * width * _ITEMSIZE),
        permute_us=predictor.memory_us(2 * case.num_tokens * case.top_k * case.token_bytes),
        sort_us=predictor.memory_us(2 * rows * case.token_bytes) if case.num_local > 1 else 0.0,
        reduce_us=predictor.memory_us((case.top_k + 1) * case.num_tokens * case.token_bytes),
        machine=machine,
    )


def _task(name: str, stream: str, duration_us: float, *needs: str) -> Task:
    return Task(name=name, stream=stream, duration_us=duration_us, needs=needs)


def _attention(case: Case, last: str) -> list[Task]:
    """Everything before the MoE layer, after the task ``last`` of the previous layer."""
    return [
        _task("launch attention", "host", case.attention_host_us),
        _task("attention", "compute", case.attention_us, "launch attention", f"previous.{last}"),
    ]


def _megatron_layer(case: Case, cost: _Costs, host: HostTime, *, number: int) -> list[Task]:
    """One operation after another; the host reads the counts after the dispatch.

    The dispatcher is the one that moves fewer bytes: an all-to-all of rows, or an all-gather of
    tokens with a reduce-scatter.
    """
    comm_us = cost.all_to_all_us(min(case.row_bytes, case.all_gather_bytes))
    return [
        *_attention(case, "restore"),
        _task("launch dispatch", "host", host.before),
        _task("permute", "compute", cost.permute_us, "launch dispatch"),
        _task("dispatch", "comm", comm_us, "permute"),
        _task("launch experts", "host", host.after + host.expert * case.num_local, "dispatch"),
        _task("experts", "compute", cost.experts_us, "launch experts"),
        _task("combine", "comm", comm_us, "experts"),
        _task("restore", "compute", cost.reduce_us, "combine"),
    ]


def _chunked_layer(case: Case, cost: _Costs, host: HostTime, *, number: int) -> list[Task]:
    """All-to-alls of chunks of tokens under the experts of other chunks.

    The host reads the counts of the gate before it launches the chunks.
    """
    comm_us = cost.all_to_all_us(case.row_bytes / number)
    launch_us = host.expert * case.num_local / number + _CHUNK_US / 2
    dispatches, experts = [], []
    for c in range(number):
        dispatches.append(_task(f"launch dispatch {c}", "host", _CHUNK_US / 2))
        dispatches.append(_task(f"dispatch {c}", "comm", comm_us, f"launch dispatch {c}"))
        needs = (f"dispatch {c}", f"launch experts {c}")
        experts.append(_task(f"launch experts {c}", "host", launch_us))
        experts.append(_task(f"experts {c}", "compute", cost.experts_us, *needs))
        experts.append(_task(f"combine {c}", "comm", comm_us, f"experts {c}"))
    return [
        *_attention(case, "restore"),
        _task("launch gate", "host", host.before),
        _task("permute", "compute", cost.permute_us, "launch gate"),
        _task("read counts", "host", host.after, "permute"),
        *dispatches,
        *experts,
        _task("restore", "compute", cost.reduce_us, *(f"combine {c}" for c in range(number))),
    ]


def _comet_layer(case: Case, cost: _Costs, host: HostTime, *, number: int) -> list[Task]:
    """Two fused kernels: all-gather with the first GEMM, second GEMM with reduction and combine.

    Copy engines gather the tokens of one rank after another, and the GEMM computes own rows first.
    The second GEMM computes columns in chunks. ``number`` CTAs sum and send the chunks that are
    complete, and the GEMM has the other SMs.
    """
    machine, num_chunks = cost.machine, _NUM_COLUMN_CHUNKS
    copy_us = case.all_gather_bytes / (NUM_RANKS - 1) / machine.copy_bytes_per_s * 1e6
    rate = min(machine.copy_bytes_per_s, number * _CTA_BYTES_PER_S)
    send_us = case.partial_sum_bytes / num_chunks / rate * 1e6
    first_us = cost.gemm_us / NUM_RANKS
    num_sms = machine.hardware.num_sms
    second_us = cost.gemm_us / num_chunks * num_sms / (num_sms - number)
    remote = range(1, NUM_RANKS)
    second = []
    for c in range(num_chunks):
        second.append(_task(f"second {c}", "compute", second_us))
        second.append(_task(f"send {c}", "comm", send_us, f"second {c}"))
    return [
        *_attention(case, second[-1].name),
        _task("launch", "host", host.before),
        *(_task(f"copy {r}", "comm", copy_us, "launch", "attention") for r in remote),
        _task("first 0", "compute", first_us, "launch"),
        *(_task(f"first {r}", "compute", first_us, f"copy {r}") for r in remote),
        _task("activation", "compute", cost.activation_us),
        *second,
    ]
