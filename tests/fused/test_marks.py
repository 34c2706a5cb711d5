"""Records of CTAs: phases without gaps, numbers of tasks by hand, equal bits, errors."""

# Calls pass plain values for parameters that a kernel annotates as tl.constexpr.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl

from halley.fused.kernels import marks
from halley.fused.kernels.layout import NUM_COPIES, NUM_TILES
from halley.fused.kernels.marks import Launch, ProgramRecords, make_status
from halley.interpreter.scheduler import current_scheduler
from tests.fused.kernel_case import KernelCase, make_dy
from tests.fused.kernel_rank import KernelRank, run_world


CPU = torch.device("cpu")
CASE = KernelCase(max_marks=64)
NUM_CTAS = {
    "plan_kernel": 8, "publish_rows_kernel": 4, "fetch_kernel": 4, "arrived_gemm_kernel": 4,
    "chunked_gemm_kernel": 4, "combine_kernel": 16,
}  # fmt: skip
FORWARD = {"plan_kernel", "fetch_kernel", "arrived_gemm_kernel", "chunked_gemm_kernel"}
BACKWARD = {"publish_rows_kernel", *FORWARD} - {"plan_kernel"}
PHASES = {
    "plan_kernel": {"other", "wait", "publish", "plan"},
    "publish_rows_kernel": {"other", "wait", "publish"},
    "fetch_kernel": {"other", "fetch"},
    "arrived_gemm_kernel": {"other", "wait", "multiply"},
    "chunked_gemm_kernel": {"other", "multiply"},
    "combine_kernel": {"other", "wait", "combine send", "combine add"},
}
DELAY_SWITCHES, SWITCH_NS = 2000, 100_000  # the interpreter's clock counts switches of threads


@dataclass(frozen=True)
class _Layout:
    max_marks: int


@triton.jit
def _marked_kernel(status, LAYOUT: tl.constexpr):
    cta_record, num_marks = marks.begin(status, marks.FETCH_KERNEL, True, LAYOUT)
    num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
    if tl.program_id(0) == 1:
        num_marks = marks.add(cta_record, num_marks, marks.FETCH, LAYOUT)
    marks.end(cta_record, num_marks, LAYOUT)


def _run(records: ProgramRecords, *, num_launches: int) -> None:
    status = make_status(records, CPU)
    for _ in range(num_launches):
        _marked_kernel[(2,)](status, _Layout(records.max_marks))


def _names(launch: Launch) -> list[list[str]]:
    return [[name for name, _, _ in phases] for phases in launch.phases]


def test_each_launch_has_the_marks_of_its_ctas_since_the_last_clear() -> None:
    records = ProgramRecords(CPU, num_records=4, max_marks=4)
    _run(records, num_launches=1)
    records.clear()
    assert records.read() == []
    _run(records, num_launches=2)
    first, second = records.read()
    assert first.end_ns <= second.start_ns
    for launch in (first, second):
        assert (launch.kernel, launch.backward, launch.num_programs) == ("fetch_kernel", True, 2)
        assert _names(launch) == [["other", "wait"], ["other", "wait", "fetch"]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_records": 3}, r"num_records \(3\) must be at least 4"),
        ({"max_marks": 3}, r"max_marks \(3\) must be at least 4"),
        ({"num_records": 1, "max_marks": 2}, r"num_records \(1\) must be at least 4"),
    ],
)
def test_buffer_that_is_too_small_is_an_error(sizes: dict[str, int], message: str) -> None:
    records = ProgramRecords(CPU, **sizes)
    _run(records, num_launches=2)  # the address sanitizer refuses a store past the end
    with pytest.raises(RuntimeError, match=message):
        records.read()


@pytest.mark.parametrize(("name", "value"), [("num_records", 0), ("max_marks", 1)])
def test_wrong_size_is_named(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least {value + 1}"):
        ProgramRecords(CPU, **{name: value})


def test_launch_with_an_incomplete_cta_is_an_error() -> None:
    records = ProgramRecords(CPU)
    _run(records, num_launches=1)
    records._words[0] = 1
    with pytest.raises(RuntimeError, match="fetch_kernel has not ended on all CTAs"):
        records.read()
    _run(records, num_launches=1)
    records._words[3] = 0  # the number of marks of the first record, until its CTA ends
    with pytest.raises(RuntimeError, match="a kernel has not ended on all CTAs"):
        records.read()


def _layer(rank: KernelRank) -> tuple[list[torch.Tensor], list[Launch], tuple[int, int]]:
    y_TD, saved = rank.forward()
    gradients = rank.backward(make_dy(rank.case, rank.rank), saved)
    summary = rank.section("summary", 16)
    sizes = int(summary[NUM_TILES.value]), int(summary[NUM_COPIES.value])
    launches = rank.records.read() if rank.records else []
    return [y_TD, *vars(gradients).values()], launches, sizes


def test_layer_records_each_cta_and_keeps_its_bits() -> None:
    plain = run_world(replace(CASE, max_marks=0), _layer)
    for rank, (values, launches, (num_tiles, num_copies)) in enumerate(run_world(CASE, _layer)):
        assert all(map(torch.equal, values, plain[rank][0]))
        for launch in launches:
            assert launch.num_programs == len(launch.phases) == NUM_CTAS[launch.kernel]
            _check_phases(launch)
        directions = [{x.kernel for x in launches if x.backward == back} for back in (False, True)]
        assert directions == [FORWARD | {"combine_kernel"}, BACKWARD | {"combine_kernel"}]
        assert len(launches) == 10
        # Tiles of 16 columns after the activation, and 32 in backward; 24 and 40 columns.
        for launch in launches:
            names = [name for names in _names(launch) for name in names]
            if launch.kernel in ("plan_kernel", "publish_rows_kernel"):
                lasts = [of_cta[-1] for of_cta in _names(launch)]
                assert lasts.count("wait") == 1  # the last CTA waits for the rows of all ranks
            if launch.kernel == "arrived_gemm_kernel":
                assert names.count("multiply") == num_tiles * (1 if launch.backward else 2)
            elif launch.kernel == "chunked_gemm_kernel":
                assert names.count("multiply") == num_tiles * 2
            elif launch.kernel == "combine_kernel":  # two chunks; 64 copies or 16 tokens of a task
                assert names.count("combine send") == 2 * num_copies // 64
                assert names.count("combine add") == 2 * (2, 1)[rank]


def _check_phases(launch: Launch) -> None:
    """Phases follow one another without gaps, and are those of the kernel."""
    assert {name for names in _names(launch) for name in names} <= PHASES[launch.kernel]
    for phases in launch.phases:
        assert phases[0][0] == "other"
        ends_ns = [end_ns for _, _, end_ns in phases]
        assert [start_ns for _, start_ns, _ in phases][1:] == ends_ns[:-1]
        assert all(start_ns <= end_ns for _, start_ns, end_ns in phases)
        assert launch.start_ns <= phases[0][1] <= ends_ns[-1] <= launch.end_ns
        total_ns = sum(end_ns - start_ns for _, start_ns, end_ns in phases)
        assert total_ns == ends_ns[-1] - phases[0][1]


def test_time_until_a_late_rank_publishes_is_a_wait() -> None:
    def run(rank: KernelRank) -> float:
        scheduler = current_scheduler()
        assert scheduler is not None
        for _ in range(DELAY_SWITCHES if rank.rank == 1 else 0):
            scheduler.step()
        rank.forward()
        assert rank.records is not None
        plan = next(x for x in rank.records.read() if x.kernel == "plan_kernel")
        times_ns = [e - s for phases in plan.phases for name, s, e in phases if name == "wait"]
        return max(times_ns)

    early_ns, late_ns = run_world(CASE, run)
    assert early_ns > DELAY_SWITCHES / 2 * SWITCH_NS > late_ns
