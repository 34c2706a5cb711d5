"""Fused MoE layer as in COMET: dispatch overlaps the first GEMM, combine overlaps the second.

Start with ``op.py``: forward and backward of one call. ``kernels/`` has the device code.
"""
