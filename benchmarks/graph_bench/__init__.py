"""Benchmark of compiled graphs: training steps with the compiler passes, in lanes, without both."""
