"""The order of Inductor's kernels: that of the graph, as far as joined kernels allow."""

from typing import Any


def keep_order(nodes: list[Any]) -> list[Any]:
    """Return kernels each at the place of the last node that it computes, after what it needs.

    Inductor puts it at the place of the first. It joins what is far apart, such as counts that a
    loss wants with the end of that loss: then all that leads to the last node came ahead of all
    that nothing waits for, and parts were written to their wholes behind forward and not beside its
    all-to-alls. A buffer comes ahead of the kernels that write to it, which torch 2.11 does not
    know of kernels that it joined.

    Args:
        nodes: of Inductor's scheduler, as its ``_post_fusion_custom_pass`` gets them.

    Contract: the same kernels, each after those whose results it reads or writes over.
    """
    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    needs = {node: [makers[name] for name in _needs(node) if name in makers] for node in nodes}
    order: dict[Any, None] = {}
    for node in sorted(nodes, key=_place):
        todo = [node]
        while todo:
            missing = [need for need in needs[todo[-1]] if need not in order]
            if missing:
                todo.append(min(missing, key=_place))
            else:
                order[todo.pop()] = None
    return list(order)


def _needs(node: Any) -> set[str]:
    """Return the names of buffers that a kernel reads, or writes to without having made them."""
    own = set(node.get_buffer_names())
    changed = {node.scheduler.mutation_real_name.get(name) for name in own}
    return ({need.name for need in node.unmet_dependencies} | changed) - own


def _place(node: Any) -> int:
    return node.max_order
