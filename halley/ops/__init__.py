"""Operators that strategies share: permutations, grouped GEMMs, all-to-alls, expert capacity.

Start with ``exchange.py``. ``traceable_routing.py`` has the same steps for ``torch.compile``;
``kernels/`` has the Triton kernels behind the operators.
"""
