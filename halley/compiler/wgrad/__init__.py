"""Schedule weight-gradient GEMMs under backward all-to-alls.

docs/lancet.md lists the rules; ``schedule.py`` names the file that applies each rule.
"""
