"""Strategies: ways to run routed experts under expert parallelism, behind one interface.

Start with ``base.py`` (the interface), then ``all_to_all.py`` (the baseline). ``registry.py``
builds strategies by name.
"""
