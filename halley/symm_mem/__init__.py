"""Symmetric memory: one tensor per rank, addressable by every rank of a group.

Start with ``heap.py`` (the interface); CUDA, POSIX shared memory and threads implement it.
"""
