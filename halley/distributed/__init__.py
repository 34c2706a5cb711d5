"""Process groups and their mesh, the launcher, and the watchdog that names lost ranks.

Start with ``world.py`` (join and leave a run), then ``mesh.py`` (who holds which experts).
"""
