"""The fused MoE layer of COMET: dispatch beside the first GEMM, combine beside the second.

Start with ``op.py``: forward and backward of one call. ``kernels/`` has the device code.
"""
