"""Plans made before a run: layers' strategies, expert placements, layouts on a cluster."""
