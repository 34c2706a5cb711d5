"""A rank pool for each test file: frameworks leave process groups and imports behind in a rank."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.rank_pool import RankPool


collect_ignore_glob = [] if find_spec("transformers") else ["test_transformers_*"]


@pytest.fixture(scope="module")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Yield pools that tests of this file share, and kill their processes at its end."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()
