"""Process groups and device mesh, the launcher, and the watchdog that reports lost ranks.

Start with ``mesh.py``: it joins a run (``join_world``) and divides the ranks into groups
(``ParallelGroups``).
"""
