"""Modules: the MoE layer, its router and experts, and a transformer built of them.

Start with ``layer.py``.
"""
