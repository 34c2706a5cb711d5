"""Define shared types, checks, configuration, routing, placement, timelines and reference layer.

Every other package may import this one. Start with ``types.py``, then ``reference.py``.
"""
