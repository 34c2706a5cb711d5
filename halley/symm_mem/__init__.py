"""Symmetric memory: each tensor has one copy per rank, and every rank can address all copies.

Start with ``heap.py``, the interface. ``cuda.py`` implements it on GPUs, ``cpu.py`` on CPUs.
"""
