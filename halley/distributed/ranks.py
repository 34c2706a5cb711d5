"""Old names of functions in ``peers.py``."""

from halley.distributed.peers import all_gather_objects, rank_and_size


place_in = rank_and_size


def gather(value, *, group, what="gather"):
    return all_gather_objects(value, group=group, operation=what)
