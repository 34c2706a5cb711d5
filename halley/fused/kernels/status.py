"""What the device tells the host without being asked: a failed wait, the size of a plan.

``status`` are int64 words in device memory: the first is zero as long as all is well, the others
say until when an emulated link into and out of this rank is busy (``kernels.link``). ``host_words``
are four int64 words that the host reads without a copy (pinned memory): the same failure, how many
rows the last plan has, 0 or the most tokens of a rank that has more than the layout holds, and how
many sends the plan has, in whole tasks.
"""

import torch


STATUS_WORDS = 3

PLAN, DISPATCH, COMBINE, HOME, STAGE, ORDER, EPOCHS, ROWS, TOKENS = range(1, 10)

_WAITS = {
    PLAN: "rank {peer} did not publish its routing (plan)",
    DISPATCH: "the rows of tile {index} did not arrive (dispatch_gemm, tile {index})",
    COMBINE: "column chunk {index} was not multiplied (gemm_combine, chunk {index})",
    HOME: "the sums of rank {peer} did not come home (gemm_combine, chunk {index})",
    STAGE: "rank {peer} did not bring its rows for another pass of call {index} (stage)",
}


_LIMITS = {
    EPOCHS: "the passes that an int32 can count are used up: make new workspaces",
    ROWS: "the experts of rank {peer} got {index} rows, more than max_load makes room for",
    TOKENS: "a rank brought {index} tokens, more than max_tokens; with max_load there is no growth",
}


def describe_failure(code: int, *, rank: int, timeout_s: float) -> str:
    """Return the sentence for a failure: code is ``op << 48 | peer << 32 | index``."""
    op, peer, index = code >> 48, (code >> 32) & 0xFFFF, code & 0xFFFFFFFF
    if op == ORDER:
        theirs = f"for another pass of call {index}" if index else "with a new call"
        return (
            f"rank {rank}: rank {peer} came {theirs}, not for what this rank runs: all ranks must "
            "run their layers, forward and backward, in the same order"
        )
    if op in _LIMITS:
        return f"rank {rank}: {_LIMITS[op].format(peer=peer, index=index)}"
    what = _WAITS[op].format(peer=peer, index=index)
    if op == STAGE and index == 0:  # of a new call
        what = f"rank {peer} did not bring its rows (plan)"
    return f"rank {rank}: {what} within {timeout_s:g} s"


def check(host_words: torch.Tensor, *, rank: int, timeout_s: float) -> None:
    """Raise what a kernel has written down.

    Raises:
        RuntimeError: a wait of this rank failed; the text names rank, peer, op and tile.
    """
    code = int(host_words[0])
    if code:
        raise RuntimeError(describe_failure(code, rank=rank, timeout_s=timeout_s))
