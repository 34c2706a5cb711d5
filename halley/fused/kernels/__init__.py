"""Triton kernels of the fused layer: tensors, integers and addresses in; one role each.

Start with ``dispatch_plan.py``, then ``dispatch_gemm.py`` and ``gemm_combine.py``.
"""

from halley.interpreter import switch as switch  # first: it decides how Triton runs
