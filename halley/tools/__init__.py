"""Measure layers and training steps, tune fused kernels, draw charts, and examine a machine.

Start with ``layer_bench.py``.
"""
