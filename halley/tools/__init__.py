"""Measure: the timer, the layer benchmark, the tuner, traces, charts and the doctor.

Start with ``layer_bench.py``.
"""
