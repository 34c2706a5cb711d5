"""Schedule weight-gradient GEMMs under backward all-to-alls.

Start with ``schedule.py``: it lists the conditions and names the files that apply them.
"""
