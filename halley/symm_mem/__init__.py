"""Symmetric memory: each tensor has one copy per rank, and every rank can address all copies.

``heap.py`` has the interface, and its implementations on CPUs and on GPUs.
"""
