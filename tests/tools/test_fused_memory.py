"""The predicted memory of a fused layer equals the bytes that it allocates, for every ``save``."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halley.core.timeline import Recorder
from halley.core.types import Activation, LayerShape, Save
from halley.fused.buffer_cache import Workspaces
from halley.fused.buffers import round_up_rows
from halley.fused.kernels.launches import num_dweight_columns
from halley.strategies.fused import FusedStrategy
from halley.tools.choice import LayerMemory, layer_memory
from tests.strategies.layer_case import SIZES, LayerCase, local_experts_of, make_tokens


CPU = torch.device("cpu")


class Tracker(TorchDispatchMode):
    """Count the live bytes of all tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live(self) -> int:
        gc.collect()  # the interpreter creates reference cycles
        storages = [known() for known in self._known.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and _key(leaf) not in self._known.keys() | given:
                self._track(leaf.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key))
        self.peak = max(self.peak, self.live)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("save", "activation"), [("all", "swiglu"), ("inputs", "gelu"), ("recompute", "swiglu")]
)
def test_prediction_equals_the_allocated_bytes(save: Save, activation: Activation) -> None:
    case = LayerCase(num_tokens_W=(90,), top_k=3, activation=activation)
    workspaces = Workspaces(None, CPU)
    strategy = FusedStrategy(workspaces, recorder=Recorder(CPU, enabled=False), save=save)
    x_TD, routing, grad_TD = make_tokens(case, 0)
    experts = local_experts_of(case, 0)
    leaves = [x_TD, routing.topk_weights_TK, experts.up_LGD, experts.down_LDF]
    tracker = Tracker()

    def run() -> int:
        y_TD = strategy.forward(x_TD, routing, experts)
        saved = tracker.live - y_TD.nbytes
        torch.autograd.grad(y_TD, leaves, grad_TD)
        return saved

    run()  # allocates the shared buffers
    gc.collect()
    gc.freeze()  # later collections visit new objects only
    try:
        with tracker:
            saved = run()
        assert tracker.live == 0
    finally:
        gc.unfreeze()
    (workspace,) = workspaces.all()
    expected = workspace.predict_size(experts.up_LGD)
    shape = LayerShape(
        num_tokens=90, num_experts=case.num_experts, top_k=case.top_k, ep_size=1, itemsize=4,
        activation=activation, **SIZES,
    )  # fmt: skip
    assert layer_memory(
        shape,
        save=save,
        capacity_rows=expected.num_rows,
        num_rows=round_up_rows(workspace.read_plan().num_rows, multiple=workspace.config.block_m),
        num_copies=expected.num_copies,
        plan_words=workspace.layout.plan_words,
        num_parts=num_dweight_columns(SIZES["intermediate_size"], workspace.config),
    ) == LayerMemory(saved=saved, peak=tracker.peak)
