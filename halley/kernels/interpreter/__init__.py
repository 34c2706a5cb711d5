"""What makes Triton's interpreter fit to test kernels of several ranks on a CPU.

As Triton ships it, the interpreter computes bfloat16 wrongly, runs the programs of a launch one
after another, so that hardly any missing wait shows, and reads or writes memory that is not a
kernel's own. ``install.install`` repairs that for the whole process; ``scheduler.Scheduler`` runs
ranks as threads, in an order that a seed fixes.
"""
