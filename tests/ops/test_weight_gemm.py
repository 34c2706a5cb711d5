"""Weight-gradient GEMM against torch, exact with small integers."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from halley.ops.kernels.tiles import GemmTile, weight_gemm


TILE = GemmTile(block_n=32, block_k=16, group=2, num_warps=4, num_stages=1)
ROWS = {
    "odd numbers": [5, 17, 1],
    "an empty expert": [16, 0, 3],
    "the first is empty": [0, 9],
    "one takes all": [0, 0, 48, 0],
    "nothing at all": [0, 0],
}


def _make(rows_L: list[int], num_m: int, num_n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return operands whose rows are padded with zeros to whole steps; NaN after the last one."""
    generator = torch.Generator().manual_seed(sum(rows_L))
    padded = [-(-rows // TILE.block_k) * TILE.block_k for rows in rows_L]
    total = sum(padded) + TILE.block_k
    grad_RM = torch.full((total, num_m), torch.nan, dtype=dtype)
    rows_RN = torch.full((total, num_n), torch.nan, dtype=dtype)
    begin = 0
    begins = []
    for rows, padded_rows in zip(rows_L, padded, strict=True):
        for side in (grad_RM, rows_RN):
            side[begin : begin + padded_rows] = 0
            whole = torch.randint(-4, 5, (rows, side.shape[1]), generator=generator)
            side[begin : begin + rows] = whole.to(dtype)
        begins.append(begin)
        begin += padded_rows
    return {
        "grad_RM": grad_RM,
        "rows_RN": rows_RN,
        "expert_begin": torch.tensor(begins, dtype=torch.int32),
        "expert_rows": torch.tensor(rows_L, dtype=torch.int32),
    }


def _run(out_LMN: torch.Tensor, sides: dict[str, Any], *, run: int, **options: Any) -> None:
    tile = dataclasses.replace(TILE, run=run)
    weight_gemm(out_LMN, **sides, tile=tile, block_m=16, **options)


def _expected(sides: dict[str, torch.Tensor]) -> torch.Tensor:
    spans = zip(sides["expert_begin"].tolist(), sides["expert_rows"].tolist(), strict=True)
    grad_RM, rows_RN = sides["grad_RM"].float(), sides["rows_RN"].float()
    return torch.stack([grad_RM[b : b + n].T @ rows_RN[b : b + n] for b, n in spans])


@pytest.mark.parametrize("rows_L", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize(
    ("dtype", "num_m", "num_n", "run"),
    [
        (torch.float32, 32, 64, 0),
        (torch.bfloat16, 40, 72, 1),
        (torch.float16, 40, 72, 2),
        (torch.float32, 40, 72, 0),
    ],
)
def test_gradient_equals_the_matmul_of_each_experts_rows(
    rows_L: list[int], dtype: torch.dtype, num_m: int, num_n: int, run: int
) -> None:
    sides = _make(rows_L, num_m, num_n, dtype)
    out_LMN = torch.full((len(rows_L), num_m, num_n), torch.nan, dtype=dtype)
    _run(out_LMN, sides, num_programs=3, run=run)
    assert torch.equal(out_LMN, _expected(sides).to(dtype))


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("num_parts", [2, 3, 4])
def test_rows_in_several_parts_are_summed(num_parts: int, run: int) -> None:
    """Parts without rows of an expert, and an expert without any rows, show wrong step ranges."""
    rows_PL = [[5, 0, 17], [0, 0, 33], [48, 0, 0], [1, 0, 16]][:num_parts]
    parts = [_make(rows_L, 40, 72, torch.float32) for rows_L in rows_PL]
    starts = [0, *itertools.accumulate(len(part["grad_RM"]) for part in parts)]
    sides = {name: torch.cat([part[name] for part in parts]) for name in ("grad_RM", "rows_RN")} | {
        "expert_begin": torch.stack(
            [part["expert_begin"] + start for part, start in zip(parts, starts, strict=False)]
        ).int(),
        "expert_rows": torch.stack([part["expert_rows"] for part in parts]),
    }
    out_LMN = torch.full((3, 40, 72), torch.nan)
    _run(out_LMN, sides, num_programs=3, run=run)
    assert torch.equal(out_LMN, torch.stack([_expected(part) for part in parts]).sum(0))


def test_too_many_parts_are_an_error() -> None:
    sides = _make([5, 17], 16, 32, torch.float32)
    for name in ("expert_begin", "expert_rows"):
        sides[name] = sides[name].expand(5, 2).contiguous()
    with pytest.raises(ValueError, match=r"expert_begin \(5 parts\) must have at most 4 parts"):
        _run(torch.empty(2, 16, 32), sides, num_programs=1, run=1)


@pytest.mark.parametrize("rows_L", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("run", [1, 2])
def test_gradient_is_added_to_float32(rows_L: list[int], run: int) -> None:
    sides = _make(rows_L, 24, 40, torch.bfloat16)
    before_LMN = torch.arange(len(rows_L) * 24 * 40).reshape(-1, 24, 40).float()
    out_LMN = before_LMN.clone()
    for _ in range(2):
        _run(out_LMN, sides, num_programs=5, accumulate=True, run=run)
    assert torch.equal(out_LMN, before_LMN + 2 * _expected(sides))
