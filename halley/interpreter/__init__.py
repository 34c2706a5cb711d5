"""Run Triton kernels of several ranks on a CPU, with correct numerics, schedules and bounds checks.

Triton's own interpreter rounds bfloat16 wrongly, runs the programs of a launch one after another,
so that most missing waits stay hidden, and lets kernels read and write memory that they do not
own. ``install.py`` repairs this for the whole process. Start with ``scheduler.py``: it runs ranks
and programs as threads, in an order that a seed fixes.
"""

from halley.interpreter import switch as switch  # first: it decides how Triton runs
