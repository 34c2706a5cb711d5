"""Modules: the MoE layer, its router and experts, and a transformer built from them.

Start with ``layer.py``. ``moe.py`` has ``halley.MoE``, the layer that sets itself up.
"""
