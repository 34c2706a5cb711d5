"""Types, configuration, named models, routing arithmetic and the reference layer.

Every other package may import this one. Start with ``types.py``, then ``reference.py``.
"""
