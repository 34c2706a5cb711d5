"""Simulated values of COMET's figures and tables, beside the published ones."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import mean

from benchmarks.papers import paper_values as paper
from benchmarks.papers.moe_systems import (
    FITTED,
    H800,
    L20,
    NUM_RANKS,
    Case,
    Constants,
    HostTime,
    Machine,
    layer_time,
)
from benchmarks.papers.paper_values import Value, make_values


COMET, BASELINES = "COMET", paper.SYSTEMS[:-1]
_MEGATRONS = ("Megatron-TE", "Megatron-Cutlass")
# Cells of figure 9 to which the constants of ``FITTED`` are fitted; all others are test cells.
CALIBRATION = tuple(
    f"{model} ({tp_size},{NUM_RANKS // tp_size}) M=4096"
    for model in ("Mixtral", "Qwen2")
    for tp_size in (1, 8)
)
_MAX_OF_EIGHT = 1.42  # mean of the largest of eight normal values, in standard deviations
_STEPS = (0.3, 0.1, 0.03, 0.01)  # relative steps of the fit


def all_values() -> list[Value]:
    """Simulate all figures of COMET's evaluation."""
    return [
        *figure_8(),
        *figure_9(),
        *artifact(),
        *figure_10(),
        *figure_11(),
        *_unknown("COMET figure 12 (one layer over TP)", _cells_12()),
        *_range("COMET figure 13 (experts, top-k)", paper.FIGURE_13, _cells_13()),
        *figure_14(),
        *averages(),
    ]


def _case(num_tokens: int, *, num_experts: int = 8, top_k: int = 2, tp_size: int = 1) -> Case:
    """Return a single layer with experts of Mixtral; ``num_tokens`` is that of all ranks."""
    return Case(
        num_tokens=num_tokens // NUM_RANKS,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=4096,
        intermediate_size=14336,
        tp_size=tp_size,
    )


def _times_ms(
    case: Case, *, machine: Machine = H800, systems: Iterable[str] = paper.SYSTEMS
) -> dict[str, float]:
    return {name: layer_time(name, case, machine=machine).time_us / 1e3 for name in systems}


def _speedup(times: Mapping[str, float]) -> float:
    """Return COMET's speed-up, the mean over the baselines."""
    return mean(times[name] / times[COMET] for name in times if name != COMET)


def _range(
    figure: str, published: tuple[float, float], cells: Iterable[Mapping[str, float]]
) -> list[Value]:
    """Return the least and the most speed-up of cells, each a mean over the baselines."""
    speedups = [_speedup(times) for times in cells]
    ends = zip(("least", "most"), published, (min(speedups), max(speedups)), strict=True)
    return make_values(figure, [(f"{end} speed-up", COMET, old, new) for end, old, new in ends])


def figure_8() -> list[Value]:
    rows = [
        (f"TP={tp} M={m}", COMET, best, layer_time(COMET, _case(m, tp_size=tp)).choice)
        for (tp, m), best in paper.FIGURE_8.items()
    ]
    return make_values("COMET figure 8 (communication CTAs)", rows, fitted=("TP=8 M=16384",))


def model_time(system: str, cell: paper.EndToEnd, constants: Constants = FITTED) -> float:
    """Simulate the forward of a model of figure 9, in ms; everything but MoE layers is given.

    The paper splits each time into the MoE layers and the rest. The sum assumes that nothing of one
    runs under the other.
    """
    model = cell.model
    case = Case(
        num_tokens=cell.num_tokens // cell.tp_size,
        num_experts=model.num_experts,
        top_k=model.top_k,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        tp_size=cell.tp_size,
    )
    layer_us = layer_time(system, case, constants=constants).time_us
    return cell.attention_ms + model.num_layers * layer_us / 1e3


def figure_9() -> list[Value]:
    """Simulate whole models; then without the part that is given, the MoE layers alone."""
    rows, moe_rows = [], []
    for cell in paper.figure_9():
        for name, published in cell.times_ms.items():
            simulated, rest = model_time(name, cell), cell.attention_ms
            rows.append((cell.name, name, published, simulated))
            moe_rows.append((cell.name, name, published - rest, simulated - rest))
    return [
        *make_values("COMET figure 9 (ms of a model)", rows, fitted=CALIBRATION),
        *make_values("COMET MoE layers of figure 9 (ms)", moe_rows, fitted=CALIBRATION),
    ]


def artifact() -> list[Value]:
    rows = []
    for num_experts, top_k, *published in paper.ARTIFACT:
        times = _times_ms(_case(8192, num_experts=num_experts, top_k=top_k, tp_size=8))
        cell = f"E={num_experts} topk={top_k}"
        rows += [(cell, name, old, times[name]) for name, old in zip(times, published, strict=True)]
    return make_values("COMET artifact (ms of a layer)", rows)


def _unknown(figure: str, cells: Mapping[str, Mapping[str, float]]) -> list[Value]:
    """Return times for which the paper shows no numbers."""
    rows = [(cell, name, None, ms) for cell, times in cells.items() for name, ms in times.items()]
    return make_values(figure, rows)


def _cells_10() -> dict[str, dict[str, float]]:
    return {f"M={m}": _times_ms(_case(m)) for m in (2048, 4096, 8192, 16384, 32768)}


def _cells_12() -> dict[str, dict[str, float]]:
    return {f"TP={tp} EP={8 // tp}": _times_ms(_case(8192, tp_size=tp)) for tp in (1, 2, 4, 8)}


def _cells_13() -> list[dict[str, float]]:
    return [
        _times_ms(_case(16384, num_experts=num_experts, top_k=top_k))
        for num_experts in (8, 16, 32)
        for top_k in (2, 4, 8)
    ]


def figure_10() -> list[Value]:
    figure, cells = "COMET figure 10 (one layer over M)", _cells_10()
    return [*_unknown(figure, cells), *_range(figure, paper.FIGURE_10, cells.values())]


def figure_11() -> list[Value]:
    rows = [
        (f"M=16384 {name}", name, published, 100 * layer_time(name, _case(16384)).hidden_share)
        for name, published in paper.FIGURE_11.items()
    ]
    return make_values("COMET figure 11 (hidden communication, %)", rows)


def figure_14() -> list[Value]:
    """Simulate loads with the given standard deviation of the experts' shares, and the L20."""
    skews = {f"std={std}": 1 + _MAX_OF_EIGHT * std * 8 for std in (0.0, 0.01, 0.02, 0.032, 0.05)}
    uneven = {cell: _times_ms(replace(_case(8192), skew=skew)) for cell, skew in skews.items()}
    layouts = [_case(8192, top_k=4, tp_size=tp_size) for tp_size in (1, 2, 4, 8)]
    cells = [_times_ms(case, machine=L20) for case in layouts]
    return [
        *_unknown("COMET figure 14 left (uneven load)", uneven),
        *_range("COMET figure 14 right (L20)", paper.FIGURE_14, cells),
    ]


def averages() -> list[Value]:
    """Average COMET's speed-ups and reductions over cells, then over the baselines."""
    layers = [*_cells_10().values(), *_cells_12().values(), *_cells_13()]
    times = [{name: model_time(name, cell) for name in cell.times_ms} for cell in paper.figure_9()]
    ratios = {
        name: [each[name] / each[COMET] for each in times if name in each] for name in BASELINES
    }
    cell = "average of a model"
    speedups = [
        ("average of a layer", COMET, paper.LAYER_SPEEDUP, mean(map(_speedup, layers))),
        (cell, COMET, paper.MODEL_SPEEDUP, mean(map(mean, ratios.values()))),
    ]
    reductions = [
        (cell, name, published, 100 * mean(1 - 1 / ratio for ratio in ratios[name]))
        for name, published in paper.FIGURE_9_REDUCTION.items()
    ]
    return [
        *make_values("COMET speed-up", speedups),
        *make_values("COMET reduction of latency (%)", reductions),
    ]


def fit(start: Constants = FITTED) -> Constants:
    """Fit constants to the calibration cells: descent along one constant after another."""
    cells = [cell for cell in paper.figure_9() if cell.name in CALIBRATION]

    def loss(values: Mapping[str, float]) -> float:
        constants = _constants(values)
        return sum(
            math.log(model_time(name, cell, constants) / published) ** 2
            for cell in cells
            for name, published in cell.times_ms.items()
        )

    values = _numbers(start)
    best = loss(values)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in values:
                for factor in (1 + step, 1 / (1 + step)):
                    trial = {**values, name: values[name] * factor}
                    if (found := loss(trial)) < best - 1e-6:
                        values, best, improved = trial, found, True
    return _constants(values)


def _numbers(constants: Constants) -> dict[str, float]:
    """Return the constants by name; both Megatrons read after the same share of a layer."""
    host = constants.host_us
    numbers = {f"{name} layer": each.before + each.after for name, each in host.items()}
    numbers |= {f"{name} expert": host[name].expert for name in BASELINES}
    numbers["before"] = host[_MEGATRONS[0]].before / numbers[f"{_MEGATRONS[0]} layer"]
    numbers["gemm_share"] = constants.gemm_share
    return numbers


def _constants(numbers: Mapping[str, float]) -> Constants:
    host = {}
    for name in paper.SYSTEMS:
        before = numbers[f"{name} layer"] * (numbers["before"] if name in _MEGATRONS else 1.0)
        host[name] = HostTime(
            before=before,
            after=numbers[f"{name} layer"] - before,
            expert=numbers.get(f"{name} expert", 0.0),
        )
    return Constants(gemm_share=numbers["gemm_share"], host_us=host)
