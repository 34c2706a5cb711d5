"""Operators that strategies share: permutations, grouped GEMMs, all-to-alls, expert capacity.

Start with ``permute.py`` and ``exchange.py``; ``kernels/`` has the Triton kernels behind them.
"""
