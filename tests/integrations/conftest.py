"""Rank pools of their own for this folder: frameworks leave groups and imports behind in a rank."""

from importlib.util import find_spec

import pytest

from tests.rank_pool import open_pools


collect_ignore_glob = [] if find_spec("transformers") else ["test_transformers_*"]


rank_pools = pytest.fixture(scope="package")(open_pools)
