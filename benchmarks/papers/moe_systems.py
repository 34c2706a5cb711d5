"""MoE systems of COMET's evaluation, each described by the tasks of one forward layer.

A task runs on a stream of one rank: "host" launches, "compute" and "comm" execute. All ranks have
the same load, so one rank is simulated; with an uneven load it is the rank with most tokens. A
layer starts with an idle host and device, and ends when both have ended.
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

    before: float  # until the host has read the counts
    after: float = 0.0  # after the read, beside the device
    expert: float = 0.0  # for each local expert


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the systems, fitted to the ``CALIBRATION`` cells of ``layer_figures``."""

    gemm_share: float  # rate of grouped GEMMs over that of dense GEMMs
    host_us: Mapping[str, HostTime]


FITTED = Constants(
    gemm_share=0.75,
    host_us={
        "Megatron-TE": HostTime(before=943.0, after=1898.0, expert=32.9),
        "Megatron-Cutlass": HostTime(before=715.0, after=1439.0, expert=13.0),
        "FasterMoE": HostTime(before=1356.0, expert=776.0),
        "Tutel": HostTime(before=1457.0, expert=113.0),
        "COMET": HostTime(before=1073.0),
    },
)
# Not fitted. Host time to launch a chunk: about 12 launches of 6 us, as in Halley's H100.
_CHUNK_US = 72.0
# Rate of one communication CTA. With it, 26 CTAs are best for TP 8 and M 16384 (figure 8).
_CTA_BYTES_PER_S = 4.4e9
_NUM_COLUMN_CHUNKS = 8  # of the second GEMM; from the source of Flux


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
    device_us: float  # until the device has ended; the best choice has the least
    hidden_share: float
    choice: int  # number of chunks, or of communication CTAs


def layer_time(
    system: str, case: Case, *, machine: Machine = H800, constants: Constants = FITTED
) -> LayerTime:
    """Simulate one forward layer of a system, with its best number of chunks or CTAs."""
    build, choices = _SYSTEMS[system]
    host, share = constants.host_us[system], constants.gemm_share
    is_chunked = system in ("FasterMoE", "Tutel")
    if is_chunked:  # they ran with EP 8 in all layouts
        case = replace(case, tp_size=1)
    times = []
    for number in choices:
        costs = _find_costs(case, machine, share=share, parts=number if is_chunked else 1)
        times.append(_time_of(build(case, costs, host, number=number), choice=number))
    return min(times, key=lambda each: each.device_us)


def _time_of(tasks: list[Task], *, choice: int) -> LayerTime:
    spans = simulate(tasks)
    comm = [span for span in spans if span.stream == "comm"]
    compute = [span for span in spans if span.stream == "compute"]
    return LayerTime(
        time_us=max(span.end_us for span in spans),
        device_us=max(span.end_us for span in (*comm, *compute)),
        hidden_share=1 - exposed_us(comm, compute) / sum(span.duration_us for span in comm),
        choice=choice,
    )


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Times in us of the operations of a layer, each for all of its rows."""

    gemm_us: float  # each of the two grouped GEMMs
    activation_us: float
    sent_us: float  # one read or write of the rows that a rank sends
    rows_us: float  # one read or write of the rows that a rank computes
    machine: Machine

    @property
    def experts_us(self) -> float:
        return 2 * self.gemm_us + self.activation_us

    def all_to_all_us(self, num_bytes: float) -> float:
        return Predictor(self.machine.hardware).all_to_all_us(num_bytes)


def _find_costs(case: Case, machine: Machine, *, share: float, parts: int = 1) -> _Costs:
    """Return the costs of one of ``parts`` equal chunks of the tokens; ``sent_us`` is of all."""
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
        sent_us=predictor.memory_us(case.num_tokens * case.top_k * case.token_bytes),
        rows_us=predictor.memory_us(rows * case.token_bytes),
        machine=machine,
    )


def _task(name: str, stream: str, duration_us: float, *needs: str) -> Task:
    return Task(name=name, stream=stream, duration_us=duration_us, needs=needs)


def _megatron_layer(case: Case, cost: _Costs, host: HostTime, *, number: int) -> list[Task]:
    """One operation after another; the host reads the counts after the dispatch.

    The dispatcher is the one that moves fewer bytes: an all-to-all of rows, or an all-gather of
    tokens with a reduce-scatter. Each orders and weights rows by operations of PyTorch. The
    comments have their reads and writes of all rows, from its dispatchers.
    """
    comm_us = cost.all_to_all_us(min(case.row_bytes, case.all_gather_bytes))
    tokens = 1 / case.top_k  # one read or write of tokens, relative to that of their rows
    local_us = cost.rows_us if case.num_local > 1 else 0.0  # one expert needs no order
    if case.row_bytes <= case.all_gather_bytes:
        # index_select (2), zeros and index_copy (3), at the end weights (2) and a sum (1) as well.
        permute_us, restore_us = 2 * cost.sent_us, (6 + tokens) * cost.sent_us
        sort_us, unsort_us = 2 * local_us, 3 * local_us
    else:
        # gather (2), zeros and scatter_add (4), by expert and of all tokens, and weights (2).
        permute_us, restore_us = 0.0, 0.0
        sort_us = 2 * local_us + 2 * cost.rows_us
        unsort_us = 4 * local_us + (5 + tokens) * cost.rows_us
    return [
        _task("launch dispatch", "host", host.before),
        _task("permute", "compute", permute_us, "launch dispatch"),
        _task("dispatch", "comm", comm_us, "permute"),
        _task("launch experts", "host", host.expert * case.num_local, "dispatch"),
        _task("experts", "compute", sort_us + cost.experts_us + unsort_us, "launch experts"),
        _task("launch the rest", "host", host.after),  # while the device executes the experts
        _task("combine", "comm", comm_us, "experts"),
        _task("restore", "compute", restore_us, "combine"),
    ]


def _faster_moe_layer(case: Case, cost: _Costs, host: HostTime, *, number: int) -> list[Task]:
    """Chunks of tokens; the host launches each local expert of a chunk."""
    experts = (host.expert / number,) * case.num_local
    return _chunked_layer(case, cost, host.before, experts_us=experts, num_chunks=number)


def _tutel_layer(case: Case, cost: _Costs, host: HostTime, *, number: int) -> list[Task]:
    """Chunks of tokens; one batched GEMM for all local experts of a chunk."""
    gate_us = host.before + host.expert * case.num_local
    return _chunked_layer(case, cost, gate_us, experts_us=(0.0,), num_chunks=number)


def _chunked_layer(
    case: Case, cost: _Costs, gate_us: float, *, experts_us: tuple[float, ...], num_chunks: int
) -> list[Task]:
    """All-to-alls of chunks of tokens under the experts of other chunks.

    The host reads the counts of the gate before it launches the chunks. ``experts_us`` has the host
    time of each launch of experts in a chunk.
    """
    comm_us = cost.all_to_all_us(case.row_bytes / num_chunks)
    order_us = 4 * cost.rows_us if case.num_local > 1 else 0.0  # rows by local expert, and back
    compute_us = (cost.experts_us + order_us) / len(experts_us)
    dispatches, experts = [], []
    for c in range(num_chunks):
        dispatches.append(_task(f"launch dispatch {c}", "host", _CHUNK_US / 2))
        dispatches.append(_task(f"dispatch {c}", "comm", comm_us, f"launch dispatch {c}"))
        experts.append(_task(f"launch combine {c}", "host", _CHUNK_US / 2))
        for i, launch_us in enumerate(experts_us):
            name = f"experts {c} {i}"
            experts.append(_task(f"launch {name}", "host", launch_us))
            experts.append(_task(name, "compute", compute_us, f"dispatch {c}", f"launch {name}"))
        experts.append(_task(f"combine {c}", "comm", comm_us, name))
    combines = (f"combine {c}" for c in range(num_chunks))
    return [
        _task("gate", "host", gate_us),
        _task("permute", "compute", 2 * cost.sent_us, "gate"),
        _task("read counts", "host", 0.0, "permute"),
        *dispatches,
        *experts,
        _task("restore", "compute", (1 + 1 / case.top_k) * cost.sent_us, *combines),
    ]


def _comet_layer(case: Case, cost: _Costs, host: HostTime, *, number: int) -> list[Task]:
    """Two fused kernels: all-gather with the first GEMM, second GEMM with reduction and combine.

    Copy engines gather the tokens of one rank after another, and the GEMM computes own rows first.
    The second GEMM computes columns in chunks. ``number`` CTAs sum and send the chunks that are
    complete, and the GEMM has the other SMs. The artifact precomputes the counts, so the host waits
    for no result of the gate and launches the kernels while the device executes others.
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
        _task("launch", "host", host.before),
        *(_task(f"copy {r}", "comm", copy_us) for r in remote),
        _task("first 0", "compute", first_us),
        *(_task(f"first {r}", "compute", first_us, f"copy {r}") for r in remote),
        _task("activation", "compute", cost.activation_us),
        *second,
    ]


# The tasks of each system, and its numbers of chunks or communication CTAs.
_SYSTEMS = {
    "Megatron-TE": (_megatron_layer, (1,)),
    "Megatron-Cutlass": (_megatron_layer, (1,)),
    "FasterMoE": (_faster_moe_layer, (2,)),
    "Tutel": (_tutel_layer, (1, 2, 4, 8)),
    "COMET": (_comet_layer, tuple(range(2, 65, 4))),
}
