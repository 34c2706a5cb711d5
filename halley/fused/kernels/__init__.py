"""Triton kernels of the fused layer and the functions that launch them.

Read them in the order of one forward pass: ``layout.py`` (buffers), ``routing_exchange.py`` and
``dispatch_plan.py`` (the dispatch plan), ``dispatch.py`` (dispatch with the first GEMM),
``combine.py`` and ``partial_sums.py`` (second GEMM with combine). ``launches.py`` launches them.
``peer.py`` has flags, waits, failures, ``marks.py`` records of each CTA's phases.
"""

from halley import interpreter as interpreter  # import first: it sets how Triton runs kernels
