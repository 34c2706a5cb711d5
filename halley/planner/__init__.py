"""Plans made before a run: strategies per layer (``step_plan.py``), and expert placements."""
