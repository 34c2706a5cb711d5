"""Operators that strategies share: all-to-alls, permutations, grouped GEMMs, expert capacity.

Start with ``exchange.py`` and ``expert_rows.py``. ``traceable_routing.py`` has the routing for
``torch.compile``; ``kernels/`` has the Triton kernels behind the operators. For lanes,
``lane_sums.py`` adds over lanes, and ``sharded_parameters.py`` uses parameters of FSDP2.
"""
