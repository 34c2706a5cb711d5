"""Predict execution times from hardware tables, measured profiles and a discrete-event simulator.

Start with ``hardware.py``; ``simulate.py`` turns tasks into a timeline.
"""
