"""Configuration classes: the positions of MoE layers. tests/hostile/data has the refused values."""

import dataclasses

import pytest

from halley.core.models import NAMED_MODELS


@pytest.mark.parametrize(
    ("num_dense_layers", "moe_interval", "moe_layers"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5, 6]),
        (3, 1, [3, 4, 5, 6]),
        (0, 2, [1, 3, 5]),
        (1, 2, [2, 4, 6]),
        (2, 3, [4]),
        (7, 1, []),
    ],
)
def test_which_layers_are_moe(
    num_dense_layers: int, moe_interval: int, moe_layers: list[int]
) -> None:
    model = dataclasses.replace(
        NAMED_MODELS["tiny"],
        num_layers=7,
        num_dense_layers=num_dense_layers,
        moe_interval=moe_interval,
        dense_intermediate_size=128,
    )
    assert [index for index in range(7) if model.is_moe_layer(index)] == moe_layers
