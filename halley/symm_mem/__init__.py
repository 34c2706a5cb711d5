"""Symmetric memory: each tensor has one copy per rank, and every rank can address all copies.

Start with ``heap.py``, the interface. ``cuda.py`` implements it on GPUs, ``posix.py`` for
processes on CPUs, and ``threads.py`` for tests in one process.
"""
