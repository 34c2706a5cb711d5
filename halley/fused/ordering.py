"""What holds the passes of fused layers in place in a compiled graph.

Each pass is a collective: ranks must run them in one order. A compiler may move what no tensor
holds in place, so passes hand on a turn: what begins one reads it, and what ends it writes it.
"""

import torch

from halley.ops.library import define


def end_pass(turn: torch.Tensor, after: torch.Tensor) -> None:
    """Let whoever reads ``turn`` from here on come after this pass.

    Args:
        turn: one int32 of the workspaces; its value means nothing.
        after: what the pass has made.
    """
    turn.copy_(_call_end_pass(after.detach()))


def _end_pass(after: torch.Tensor) -> torch.Tensor:
    return after.new_empty(1, dtype=torch.int32)


_call_end_pass = define("end_pass(Tensor after) -> Tensor", _end_pass, _end_pass)
