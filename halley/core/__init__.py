"""Types, checks, configuration, named models, routing, placement, timelines, reference layer.

Every other package may import this one. Start with ``types.py``, then ``reference.py``.
"""
