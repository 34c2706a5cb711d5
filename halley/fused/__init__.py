"""The fused MoE layer of COMET: dispatch inside the first GEMM, combine inside the second.

Start with ``op.py``: forward and backward of one call. ``kernels/`` has the device code.
"""
