"""Memory of a fused layer: predicted and allocated for every ``save``, and buffers by hand."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.core.types import Activation, LayerShape, Save
from halley.distributed.mesh import build_groups
from halley.fused.buffers import Workspaces
from halley.fused.kernels.launches import num_dweight_columns
from halley.fused.replay import round_up_rows
from halley.strategies.fused import FusedStrategy
from halley.strategies.registry import build_strategy
from halley.tools.choice import LayerMemory, layer_memory, measure_buffers
from halley.tools.layer_case import LayerCase as BenchCase
from halley.tools.layer_case import make_tensors, outputs_of
from tests.moe.model_case import CPU, destroy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import SIZES, LayerCase, local_experts_of, make_tokens


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
    expected = workspace.plan_sizes.predict(experts.up_LGD)
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


def _measure_buffers(rank: int, num_ranks: int) -> dict[str, float]:
    groups = build_groups(0, device_type="cpu")
    case = BenchCase(model=find_model("tiny"), num_tokens=64, dtype=torch.float32)
    workspaces = Workspaces(groups.ep, CPU)
    strategy = build_strategy(
        "fused", groups.ep, recorder=Recorder(CPU, enabled=False), device=CPU,
        workspaces=workspaces,
    )  # fmt: skip
    outputs_of(strategy, make_tensors(case, groups, device=CPU), backward=False)
    (buffers,) = [measure_buffers(each) for each in workspaces.all()]
    workspaces.close()
    destroy(groups)
    return buffers


def test_buffers_of_fused_on_two_ranks(run_ranks: RunRanks) -> None:
    """Tiny: 128 floats a token, 8 experts on 2 ranks, 2 experts a token; 32 tokens are a block."""
    buffers, other = run_ranks(_measure_buffers, 2)
    assert buffers == other
    # In words: header, 10 columns of 2 blocks padded to 32, packed, weights.
    record = 16 + 32 + 128 + 128
    routing = 4 * (16 + 2 * 64 + 16 + 16 + 16 + 2 * 2 * record)
    send, combine, weight_grads = 2 * 64 * 128 * 4, 2 * 64 * 128 * 4, 2 * 64 * 2 * 4
    assert 0 < buffers.pop("plan_mib") < 1
    assert buffers == {
        "routing_mib": routing / 2**20,
        "send_mib": send / 2**20,
        "combine_mib": combine / 2**20,
        "weight_grads_mib": weight_grads / 2**20,
        "symm_mib": (routing + send + combine + weight_grads) / 2**20,
    }
