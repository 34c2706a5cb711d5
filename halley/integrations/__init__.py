"""Halley's experts inside other frameworks; each is imported only where it is asked for."""
