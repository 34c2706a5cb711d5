"""``nn.Module``s: the MoE layer, its router and experts, and a transformer built from them.

Start with ``layer.py``. ``moe.py`` has ``halley.MoE``, a layer that builds its own groups.
"""
