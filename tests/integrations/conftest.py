"""Ranks of their own for tests with frameworks, which leave process groups and imports behind."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.rank_pool import RankPool


collect_ignore_glob = [] if find_spec("transformers") else ["test_huggingface*"]


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Yield pools that no other test uses; kill their processes at the end."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()
