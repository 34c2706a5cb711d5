"""Mixture-of-Experts training whose communication hides behind computation."""

__version__ = "0.1.0"
