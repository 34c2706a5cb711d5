"""Passes through the buffers of a workspace, repeated from tapes where that is possible."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from halley.core.types import Save
from halley.fused.buffers import PlanSize, Workspace
from halley.fused.kernels.layout import ANY_SENDS
from halley.interpreter.switch import INTERPRETED
from halley.ops.kernels.driver import current_stream
from halley.ops.kernels.launch import only_compiles
from halley.ops.kernels.replay import Results, record, share_memory


Kept: TypeAlias = Save | Literal["none"]
_MOST_TAPES = 512


def run_pass(
    workspace: Workspace,
    key: tuple[object, ...] | None,
    inputs: Sequence[torch.Tensor],
    run: Callable[[], Results],
) -> Results:
    """Run a pass, or repeat what it launched on tensors of the same sizes before.

    Args:
        workspace: whose buffers it uses.
        key: all that its launches depend on but addresses, sizes and dtypes of the inputs included;
            None runs it as it is written, as it must where launchers work on copies of inputs.
        inputs: its tensors but those of the workspace.
        run: the pass, see ``kernels.tape``; begins one in the workspace.
    """
    if INTERPRETED or key is None or only_compiles():
        return run()
    tape = workspace.tapes.get(key)
    if tape is not None:
        workspace.begin()
        return tape.repeat(current_stream(inputs[0].device.index), inputs)
    if share_memory(inputs):  # as in ``y.backward(x)``: a tape could not tell which was launched on
        return run()
    results, tape = record(run, inputs, workspace.lasting())
    if len(workspace.tapes) == _MOST_TAPES:
        workspace.tapes.clear()
    workspace.tapes[key] = tape
    return results


def run_by_plan(
    workspace: Workspace,
    start: Callable[[int, int], Results],
    launch: Callable[[torch.Tensor, int, int], Results],
    *,
    save: Kept,
    layer: int,
) -> tuple[PlanSize, Results]:
    """Make a plan and run by it; return its size, of one tile at least, and the results.

    Args:
        start: makes the plan, and runs in tensors of that many rows and sends at once, unless it is
            0 rows. If there are more, nothing is done.
        launch: runs by the plan, whose numbers of rows and sends it gets.
        layer: by which the size of its last plan is known, see ``Workspace.expect``.
    """
    while True:
        # Before the host knows whether all rows fit, so that it reads meanwhile.
        expected = workspace.expect(layer)
        room = workspace.capacity if save == "none" else expected.num_rows
        room = min(room, workspace.capacity)
        room_sends = expected.num_sends if save == "inputs" else ANY_SENDS
        results = start(room, room_sends)
        size = workspace.read_plan(layer)
        if not size.wanted_tokens:
            break
        del results
        workspace.grow(size.wanted_tokens)  # all ranks read the same, and come here together
    size = replace(size, num_rows=max(size.num_rows, workspace.knobs.block_m))
    if size.num_rows > workspace.capacity:
        workspace.reserve(size.num_rows)
    if size.num_rows <= room and size.num_sends <= room_sends:
        return size, results
    plan = results[0]
    assert plan is not None
    del results  # of no use, and as large as those that come
    return size, launch(plan, size.num_rows, size.num_sends)
