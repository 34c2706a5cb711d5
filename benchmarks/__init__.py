"""Scripts that produce benchmarks/results/, and the tables made from these results.

Run a script in the root of the repository. ``graph_bench`` and ``model_bench`` are commands with
``--help``; the docstring of every other script shows its command line.
"""
