"""Ways to run routed experts under expert parallelism, behind one interface.

Start with ``base.py`` (the interface), then ``sequential.py`` (the baseline).
"""
