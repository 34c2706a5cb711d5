"""Schedule weight-gradient GEMMs under backward all-to-alls.

Start with ``schedule.py``.
"""
