"""Predict times: hardware tables, measured profiles, and a discrete-event simulator.

Start with ``predict.py``; ``simulate.py`` turns tasks into a timeline.
"""
