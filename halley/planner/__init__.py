"""Plans made before a run: a strategy and compiler passes per layer, and expert placements.

Start with ``step_plan.py``.
"""
