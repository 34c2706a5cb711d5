"""Process groups and device mesh, the launcher, and the watchdog that reports lost ranks.

Start with ``world.py`` (join and leave a run), then ``mesh.py`` (which rank holds which experts).
"""
