"""Strategies: ways to run routed experts under expert parallelism, behind one interface.

Start with ``base.py``, then ``all_to_all.py``. ``registry.py`` builds strategies by name.
"""
