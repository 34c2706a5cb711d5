"""Microbatch lanes: interleave the compiled graph segments of a training step's microbatches.

Start reading in ``lane_step.py``, which has the entry point ``compile_step`` and the order of the
work: capture, cut, compile, measure, schedule, run. docs/lanes.md explains the method.
"""

from halley.lanes.lane_schedule import LanePlan
from halley.lanes.lane_step import LaneStep, compile_step


__all__ = ["LanePlan", "LaneStep", "compile_step"]
