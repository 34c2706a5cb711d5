"""Failure codes that kernels write for the host, and the sentences that the host raises.

A kernel that fails stores one int64 code twice. ``status`` is one word in device memory, which the
other kernels of the rank poll: a nonzero code ends all their waits. ``host_status`` is four int64
words in pinned memory, which the host reads without a copy or a synchronization:

    [0] failure code, 0 while all is well
    [1] rows of the plan made last, padded to whole tiles
    [2] most tokens of any rank if they exceed the send buffer, else 0
    [3] length of the plan's list of token copies, padded to whole tasks
"""

import torch
import triton.language as tl


STATUS_WORDS = 1
HOST_STATUS_WORDS = 4

PLAN = tl.constexpr(1)
DISPATCH = tl.constexpr(2)
COMBINE = tl.constexpr(3)
SUMS = tl.constexpr(4)
ROWS = tl.constexpr(5)
ORDER = tl.constexpr(6)
EPOCHS = tl.constexpr(7)
MAX_ROWS = tl.constexpr(8)
MAX_TOKENS = tl.constexpr(9)

_WAITS = {
    PLAN.value: "rank {peer} did not publish its routing (plan)",
    DISPATCH.value: "the rows of tile {index} did not arrive (dispatch_gemm, tile {index})",
    COMBINE.value: "column chunk {index} was not multiplied (gemm_combine, chunk {index})",
    SUMS.value: "rank {peer} did not send its partial sums (gemm_combine, chunk {index})",
    ROWS.value: "rank {peer} did not publish its rows for another pass of call {index}",
}

_LIMITS = {
    EPOCHS.value: "the int32 pass counter is exhausted: make new workspaces",
    MAX_ROWS.value: "the experts of rank {peer} got {index} rows, more than max_load allows",
    MAX_TOKENS.value: (
        "a rank has {index} tokens, more than max_tokens; with max_load buffers do not grow"
    ),
}


def describe_failure(code: int, *, rank: int, timeout_s: float) -> str:
    """Return the error message of a failure code.

    Args:
        code: ``kind << 48 | peer << 32 | index``. ``index`` is a tile, a column chunk, a call (0
            for a new call), a number of rows or a number of tokens, depending on the kind.
        rank: the rank whose kernel wrote the code.
        timeout_s: time limit of waits.
    """
    kind, peer, index = code >> 48, (code >> 32) & 0xFFFF, code & 0xFFFFFFFF
    if kind == ORDER.value:
        running = f"another pass of call {index}" if index else "a new call"
        return (
            f"rank {rank}: rank {peer} runs {running}, and this rank does not: all ranks must "
            "run their layers, forward and backward, in the same order"
        )
    if kind in _LIMITS:
        return f"rank {rank}: {_LIMITS[kind].format(peer=peer, index=index)}"
    if kind == ROWS.value and index == 0:
        text = f"rank {peer} did not publish its rows (plan)"
    else:
        text = _WAITS[kind].format(peer=peer, index=index)
    return f"rank {rank}: {text} within {timeout_s:g} s"


def check(host_status: torch.Tensor, *, rank: int, timeout_s: float) -> None:
    """Raise an error if a kernel of this rank reported a failure.

    Args:
        host_status: ``(HOST_STATUS_WORDS,)`` int64, pinned memory.

    Raises:
        RuntimeError: a kernel failed; the text names rank, peer, operation and tile.
    """
    code = int(host_status[0])
    if code:
        raise RuntimeError(describe_failure(code, rank=rank, timeout_s=timeout_s))
