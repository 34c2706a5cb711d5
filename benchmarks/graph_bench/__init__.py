"""Benchmark of compiled graphs: Lancet's GPT-2 models without and with the compiler passes."""
