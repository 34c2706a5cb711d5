"""Passes through the buffers of a workspace, repeated from tapes where that is possible."""

from collections.abc import Callable, Sequence

import torch

from halley.kernels.driver import current_stream
from halley.kernels.launch import only_compiles
from halley.kernels.switch import INTERPRETED
from halley.kernels.tape import Results, record, share_memory
from halley.ops.workspace import Workspace


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
