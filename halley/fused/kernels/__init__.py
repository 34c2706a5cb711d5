"""Triton kernels of the fused layer and the functions that launch them.

Read them in the order of one forward pass: ``layout.py`` (buffers), ``routing_exchange.py`` and
``dispatch_plan.py`` (the dispatch plan), ``fetch.py`` and ``dispatch.py`` (dispatch with the first
GEMM), ``combine_gemm.py``, ``combine.py`` and ``partial_sums.py`` (second GEMM with combine).
``send_buffer.py`` is the first launch of a backward pass. ``peer.py`` has flags, waits, failures.
"""

from halley.interpreter import switch as switch  # first: it decides how Triton runs
