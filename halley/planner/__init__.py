"""Make plans before a run: strategies of layers, placements of experts, layouts on a cluster."""
