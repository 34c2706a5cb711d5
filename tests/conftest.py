"""Fixtures of all tests: ranks are processes, so a test of W ranks needs no GPU or launcher."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


# The ranks inherit this environment when the fork server starts.
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it once, when first imported
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else each rank starts compiler processes
# Else each process with Inductor tries for seconds whether code for this CPU compiles and loads.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["HALLEY_KERNEL_CONFIG"] = os.devnull  # ignore kernels that a user tuned on this machine
# Let torch look for GPUs with NVML, because forked ranks cannot use an initialized CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# With "CI", torch raises an error if the result of an operator shares memory with an input.
os.environ["CI"] = "1"
# The loopback device needs no host name that resolves.
os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
# The fork server passes PYTHONPATH to the ranks, but not sys.path.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)

from tests.rank_pool import OBJECTS_PER_COLLECTION, RankPool, RunRanks, T, open_pools


gc.set_threshold(OBJECTS_PER_COLLECTION)

# The tier of a folder's tests, unless they start ranks.
TIERS = {
    "core": "unit",
    "cost": "unit",
    "planner": "unit",
    "compiler": "unit",
    "lanes": "unit",
    "cli": "unit",
    "fused": "kernels",
    "interpreter": "kernels",
    "ops": "kernels",
    "integrations": "integrations",
}
# Modules that compile models with Inductor, run commands, or train: too slow for the unit tier.
SLOW_MODULES = {
    "test_bench_layer", "test_doctor", "test_gradient_ready", "test_group_cost", "test_inductor",
    "test_kill", "test_lane_step", "test_plan", "test_planned_run", "test_run",
    "test_step_plan", "test_trace", "test_train_and_export",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marker of its tier: unit, ranks, kernels or integrations."""
    root = Path(__file__).parent
    for item in items:
        tier = TIERS.get(item.path.relative_to(root).parts[0], "ranks")
        starts_ranks = "run_ranks" in getattr(item, "fixturenames", ())
        if tier == "unit" and (starts_ranks or item.path.stem in SLOW_MODULES):
            tier = "ranks"
        item.add_marker(tier)
    items.sort(key=lambda item: item.path.stem not in SLOW_MODULES)  # short ones at the end


rank_pools = pytest.fixture(scope="session")(open_pools)


@pytest.fixture
def run_ranks(rank_pools: dict[int, RankPool]) -> RunRanks:
    """Return the function that runs a module's function on every rank of a gloo group.

    ``run_ranks(fn, num_ranks, *args, timeout_s=60.0)`` calls ``fn(rank, num_ranks, *args)`` on
    each rank and returns the results by rank; a failure on any rank fails the test.
    """

    def run(
        fn: Callable[..., T], num_ranks: int, *args: object, timeout_s: float = 60.0
    ) -> list[T]:
        __tracebackhide__ = True
        pool = rank_pools.setdefault(num_ranks, RankPool(num_ranks))
        return pool.run(fn, *args, timeout_s=timeout_s)

    return run
