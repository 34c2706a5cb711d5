"""Run Triton kernels of several ranks on a CPU: correct bfloat16, schedules, and bounds checks.

Triton's own interpreter has three defects. It rounds bfloat16 wrongly. It runs the programs of a
launch one after another, so that most missing waits have no effect. It lets kernels access any
memory. ``install.py`` repairs them for the whole process. Start with ``scheduler.py``, which runs
ranks and programs as threads in an order that a seed determines.
"""

from halley.interpreter import switch as switch  # before triton: it sets TRITON_INTERPRET
