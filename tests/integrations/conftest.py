"""Ranks of their own for tests with frameworks, which leave process groups and imports behind."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.rank_pool import RankPool


collect_ignore_glob = [] if find_spec("transformers") else ["test_huggingface*"]


@pytest.fixture(scope="module")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Yield pools that no other file's tests use; kill their processes, which poll, at its end."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()
