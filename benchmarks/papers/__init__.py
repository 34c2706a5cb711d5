"""Reproduce the figures of the COMET and Lancet papers by simulation of the papers' hardware."""
