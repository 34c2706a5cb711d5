"""A replayed pass launches on the tensors of its own call. Launches are recorded, not made.

tests/strategies/test_fused_cuda.py replays real passes.
"""

from typing import Any, get_args

import pytest
import torch

from halley.core.types import Experts, Routing, Save
from halley.fused import replay
from halley.fused.buffers import Workspaces
from halley.ops.kernels.launch import Launcher, note_step, only_compiles
from halley.strategies.fused import FusedStrategy
from tests.strategies.layer_case import CPU, build


TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 24, 32, 16, 4, 2
ROWS, CAPACITY = 5 * 16, 6 * 16  # rows of the plan in whole tiles, and with the margin
COPIES = 64


class Launch:
    """Replaces a compiled kernel; returns arguments as parameters of the driver."""

    overlaps = False

    def __init__(self, name: str) -> None:
        self.name = name

    def flatten(self, index: int, arg: Any) -> tuple[Any, ...]:
        if isinstance(arg, int):
            return (arg,)
        if isinstance(arg, torch.Tensor):
            return (arg.data_ptr(),)
        return (self.map_at(index, arg, arg.base.data_ptr()), *arg.shape, *arg.strides)

    def map_at(self, index: int, desc: Any, address: int) -> int:
        return address


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Any]]]:
    """Return the list of replayed launches, by name and with all their values."""
    made: list[tuple[str, list[Any]]] = []

    class Prepared:
        def __init__(self, launch: Launch) -> None:
            self.launch = launch

        def fill(self, values: list[Any]) -> None:
            self.values = list(values)

        def set_address(self, place: int, address: int) -> None:
            self.values[place] = address

        set_map = set_address

        def __call__(self, stream: int) -> None:
            made.append((self.launch.name, list(self.values)))

    def note(launcher: Launcher, _: int, args: Any, constants: Any, **options: Any) -> None:
        note_step((Launch(launcher.kernel.fn.__name__), args))

    monkeypatch.setattr(Launcher, "__call__", note)
    monkeypatch.setattr(replay, "PreparedLaunch", Prepared)
    monkeypatch.setattr(replay, "INTERPRETED", False)
    monkeypatch.setattr(replay, "current_stream", lambda device: 0)
    return made


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("save", get_args(Save))
def test_compile_covers_all_launches(
    monkeypatch: pytest.MonkeyPatch, save: Save, fused: bool, backward: bool
) -> None:
    launched: dict[bool, set[Any]] = {True: set(), False: set()}

    def note(launcher: Launcher, num_programs: int, _: Any, constants: Any, **options: Any) -> None:
        kind = (launcher.kernel.fn.__name__, num_programs, constants, *map(str, options.items()))
        launched[only_compiles()].add(kind)

    monkeypatch.setattr(Launcher, "__call__", note)
    strategy = build(Workspaces(None, CPU, max_tokens=TOKENS), fused=fused, save=save)
    experts = _experts(main_grad=False)
    layer = (*_inputs(), experts)
    workspace = strategy.prepare(*layer)
    strategy.compile(*layer, backward=backward)
    assert launched[False] == set()
    with torch.set_grad_enabled(backward):
        for _ in range(3):
            y_TD = strategy.forward(*_inputs(), experts)
            workspace.host_status[1] = ROWS
            if backward:
                y_TD.sum().backward()
    assert launched[False] == launched[True]
    assert len(launched[True]) >= (8 if backward else 4)


def _experts(*, main_grad: bool) -> Experts:
    up_LGD = torch.randn(EXPERTS, 2 * INNER, HIDDEN).requires_grad_()
    down_LDF = torch.randn(EXPERTS, HIDDEN, INNER).requires_grad_()
    for weight in (up_LGD, down_LDF) if main_grad else ():
        weight.main_grad = torch.zeros_like(weight)  # pyright: ignore[reportAttributeAccessIssue]
    return Experts(up_LGD=up_LGD, down_LDF=down_LDF)


def _inputs() -> tuple[torch.Tensor, Routing]:
    routing = Routing(
        topk_idx_TK=torch.zeros(TOKENS, TOP_K, dtype=torch.int64),
        topk_weights_TK=torch.rand(TOKENS, TOP_K).requires_grad_(),
    )
    return torch.randn(TOKENS, HIDDEN).requires_grad_(), routing


def _forward(strategy: FusedStrategy, experts: Experts) -> tuple[torch.Tensor, Any]:
    x_TD, routing = _inputs()
    y_TD = strategy.forward(x_TD, routing, experts)
    for workspace in strategy.workspaces.all():
        # As the plan kernel would have stored.
        workspace.host_status[1], workspace.host_status[3] = ROWS, COPIES
    return x_TD, y_TD


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("save", get_args(Save))
def test_replayed_backward_uses_the_tensors_of_its_own_call(
    repeated: list[tuple[str, list[Any]]], save: Save, fused: bool, main_grad: bool
) -> None:
    strategy = build(Workspaces(None, CPU, max_tokens=TOKENS), fused=fused, save=save)
    experts = _experts(main_grad=main_grad)
    calls = []
    for _ in range(4):  # the first knows no plan yet, the second is noted; memory stays in use
        calls.append(_forward(strategy, experts))
        repeated.clear()
        x_TD, y_TD = calls[-1]
        _, saved, _, pre_RG, up_LGD, down_LDF, _ = y_TD.grad_fn.saved_tensors
        address, num_rows = saved.data_ptr(), saved.shape[0]
        num_bytes = saved.untyped_storage().nbytes()
        grad_TD = torch.randn_like(y_TD)
        y_TD.backward(grad_TD)
    names = [name for name, _ in repeated]
    assert names.count("weight_gemm_kernel") == 2
    assert names[0] == ("fetch_kernel" if save == "inputs" else "publish_rows_kernel")
    values = [value for _, launched in repeated for value in launched]
    published = next(launched[0] for name, launched in repeated if name == "publish_rows_kernel")
    assert published == (x_TD if save == "recompute" else grad_TD).data_ptr()
    assert grad_TD.data_ptr() in values
    assert num_rows == {"recompute": TOKENS, "inputs": COPIES, "all": ROWS}[save]
    assert address in values
    if save == "all":
        assert pre_RG.shape[0] == ROWS
        assert num_bytes == CAPACITY * HIDDEN * saved.itemsize
        assert pre_RG.data_ptr() in values
        by_kernel = [launched for name, launched in repeated if name == "weight_gemm_kernel"]
        assert saved.data_ptr() in by_kernel[1]
    for weight in (up_LGD, down_LDF):
        assert weight.data_ptr() in values
    for weight in (experts.up_LGD, experts.down_LDF) if main_grad else ():
        assert weight.main_grad.data_ptr() in values  # pyright: ignore[reportAttributeAccessIssue]
