"""Rank pools of their own for this folder: frameworks leave groups and imports behind in a rank."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.rank_pool import RankPool


collect_ignore_glob = [] if find_spec("transformers") else ["test_transformers_*"]


@pytest.fixture(scope="package")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Yield pools that the tests of this folder share, and kill their processes at the end."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()
