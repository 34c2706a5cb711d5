"""Benchmark of whole training steps of named models, one result line per strategy."""
