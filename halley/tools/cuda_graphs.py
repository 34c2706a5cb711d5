"""Runs of a layer as CUDA graphs: the host issues one call however many kernels there are."""

from collections.abc import Callable

import torch


_NUM_WARMUPS = 3


def captured(run: Callable[[], object], *, device: torch.device) -> Callable[[], None]:
    """Return what replays a run on the current stream, on the very tensors that it ran on.

    A collective where the run is one: it runs some times first, so that all is made that the first
    call makes.

    Args:
        run: work on ``device`` that nothing on the host depends on.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_NUM_WARMUPS):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls are looked at: a watchdog's may ask for events meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph.replay
