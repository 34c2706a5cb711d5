"""Run the items of all microbatches of a step in a given order; add up the gradients."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

from halley.compiler.graph_analysis import is_grouped_gemm
from halley.core.timeline import Recorder
from halley.lanes.action import Action, Order, Value, group_items, join, take
from halley.lanes.cut import Item, Lanes
from halley.lanes.item_clock import ItemClock, item_name
from halley.lanes.segment_compiler import Call
from halley.lanes.segment_graphs import SegmentGraphs, can_capture, share_memory
from halley.ops.gradient_hook import find_gradient_hook
from halley.ops.sm_carveout import sm_carveout


@final
class Executor:
    """Runs the items of all microbatches of a training step in one fixed order.

    Args:
        loss: name of the loss among the items' outputs.
        captures: whether the first step captures items of static shapes as CUDA graphs.
        joins: whether items that ``group_items`` puts together become one CUDA graph, which the
            host launches in less time than a graph for each item.
        graph_bytes: predicted bytes of the memory of these graphs.
        sm_margins: number of SMs that dense and grouped GEMMs leave free for communication.
        lent: result of ``release`` of an executor that this one replaces. The first step moves
            these tensors to other memory if they are still in use.
    """

    def __init__(
        self,
        items: Sequence[Item],
        calls: Sequence[Call],
        order: Order,
        *,
        loss: str,
        captures: bool = False,
        joins: bool = False,
        graph_bytes: int = 0,
        sm_margins: tuple[int, int] = (0, 0),
        lent: Sequence[weakref.ref[torch.Tensor]] = (),
    ) -> None:
        check_order(items, order)
        self._loss = loss
        num_microbatches = len({microbatch for microbatch, _ in order})
        read_later: set[Value] = {(microbatch, loss) for microbatch, _ in order}
        captured = {index for index, item in enumerate(items) if can_capture(item)}
        actions: dict[tuple[int, int], Action] = {}
        for microbatch, index in reversed(order):
            item = items[index]
            is_read = tuple((microbatch, name) in read_later for name in item.outputs)
            lanes = item.read_lanes(microbatch, num_microbatches)
            reads = tuple((lane, name) for lane in lanes for name in item.inputs)
            last_reads = tuple(each not in read_later for each in reads)
            read_later.update(reads)
            call = calls[index] if item.lanes == "own" else partial(_sum, item.lanes)
            if num_sms := sm_margins[_has_grouped_gemm(item)]:
                call = partial(_leave_sms, num_sms, call)
            actions[microbatch, index] = Action(
                name=item_name(microbatch, index, item.kind),
                stream={"wait": "exposed", "host": "host"}.get(item.kind, "compute"),
                call=call,
                can_capture=index in captured,
                reads=reads,
                last_reads=last_reads,
                results=tuple((microbatch, name) for name in item.outputs),
                is_read=is_read,
                gradients=tuple(
                    (item.outputs.index(name), position) for name, position in item.gradients
                ),
            )
        self._actions = [actions[each] for each in order]
        if joins:
            self._actions = []
            for group in group_items(items, order, captured):
                members = [actions[each] for each in group]
                self._actions += [join(members)] if members[0].can_capture else members
        self._captures, self._graph_bytes = captures, graph_bytes
        self._captured: list[Action] = []
        self._graphs: SegmentGraphs | None = None  # keeps the memory that all graphs use
        self._addresses: list[int] = []  # of the parameters, when the items were captured
        # The tensors of ``.grad`` of the last step that have the memory of a CUDA graph's results.
        self._lent = [*lent]

    def run(
        self,
        inputs: Sequence[dict[str, Any]],
        parameters: Sequence[Any],
        *,
        recorder: Recorder | ItemClock,
        num_repeats: int = 0,
    ) -> list[torch.Tensor]:
        """Run all microbatches; add gradients to ``.grad`` or call hooks; return the losses.

        Args:
            inputs: for each microbatch, inputs of forward and the gradient of the loss, by name.
            parameters: values of the inputs of forward, by position.
            num_repeats: how often each CUDA graph runs before the run that is recorded, with the
                same results; not in a step that captures them. Needs ``joins=False``.
        """
        values = {
            (microbatch, name): value
            for microbatch, each in enumerate(inputs)
            for name, value in each.items()
        }
        _copy_lent(self._lent)
        gradients = _Gradients(parameters, lent=self._lent)
        # For collectives, the autograd key runs Python code, which takes host time: skip this key.
        # Autocast is off, because the graphs contain its casts already.
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),  # pyright: ignore[reportPrivateUsage]
            torch._C._DisableAutocast(),  # pyright: ignore[reportPrivateUsage]
        ):
            for action in self._with_graphs(values, parameters):
                _run(action, values, gradients, recorder, num_repeats)
        return [values[microbatch, self._loss] for microbatch in range(len(inputs))]

    def _with_graphs(self, values: dict[Value, Any], parameters: Sequence[Any]) -> Iterable[Action]:
        """Return a step's actions; with ``captures``, CUDA graphs run the items that allow it."""
        if not self._captures:
            return self._actions
        addresses = [each.data_ptr() for each in parameters if isinstance(each, nn.Parameter)]
        is_captured = bool(self._captured) and addresses == self._addresses
        return self._captured if is_captured else self._capture(values, parameters, addresses)

    def _capture(
        self, values: dict[Value, Any], parameters: Sequence[Any], addresses: list[int]
    ) -> Iterator[Action]:
        """Yield each action, captured as a CUDA graph if ``can_capture``, for the caller to run.

        Later steps use the actions if they have all run and the parameters have these addresses.
        """
        self.release()
        self._graphs = graphs = SegmentGraphs(self._graph_bytes)
        captured: list[Action] = []
        fixed = {each for each, value in values.items() if isinstance(value, nn.Parameter)}
        waiting = self._actions[::-1]
        while waiting:
            action = waiting.pop()
            # A graph cannot read CPU tensors. So only the part that reads one runs without a graph.
            if len(action.parts) > 1 and any(map(_is_on_cpu, map(values.get, action.reads))):
                waiting += action.parts[::-1]
                continue
            is_graph = False
            if action.can_capture:
                first = _first_gradients(action, parameters)
                try:
                    arguments, is_fixed = _hand_over(action, values, fixed)
                    # If it runs several times in a step, it may not write to its inputs' memory.
                    inputs = [] if action.parts else [*arguments]
                    call, lasts = graphs.capture(action.call, arguments, is_fixed, kept=first)
                    del inputs
                    action = replace(action, call=call, lasts=lasts)
                    fixed.update(action.results)
                    is_graph = True
                except RuntimeError as error:
                    text = f"halley runs item {action.name} without a CUDA graph: {error}"
                    warnings.warn(text, stacklevel=6)
                    action = replace(action, call=partial(_call_and_copy, action.call))
            captured.append(replace(action, is_graph=is_graph))
            yield action  # its first results own their memory, so it must not run again now
        self._captured, self._addresses = captured, addresses

    def release(self) -> list[weakref.ref[torch.Tensor]]:
        """Free the CUDA graphs; return the tensors of ``.grad`` that still have their memory."""
        if self._graphs:
            torch.cuda.synchronize()  # the graphs may still run
            self._captured, self._graphs = [], None
        return self._lent


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_cuda


def _hand_over(
    action: Action, values: dict[Value, Any], fixed: Container[Value]
) -> tuple[list[Any], list[bool]]:
    """Return the arguments of an action, and for each whether it keeps its address.

    ``values`` keeps only the addresses of those that do and that no later action reads. So their
    memory is free once a capture of the action has used them.
    """
    arguments = [values[each] for each in action.reads]
    for value, is_last in zip(action.reads, action.last_reads, strict=True):
        if is_last and value in fixed:
            values[value] = share_memory(values[value])
    return arguments, [each in fixed for each in action.reads]


def _call_and_copy(call: Call, values: list[Any]) -> list[Any]:
    """Call an action's function; copy results that have the memory of an argument.

    ``_hand_over`` has given this memory back, so graphs of later items may use it.
    """
    storages = {each.untyped_storage()._cdata for each in values if isinstance(each, torch.Tensor)}
    return [
        each.clone()
        if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata in storages
        else each
        for each in call(values)
    ]


def _first_gradients(action: Action, parameters: Sequence[Any]) -> list[bool]:
    """Return for each result whether it can become the ``.grad`` of one parameter."""
    num_parameters = Counter(at for at, _ in action.gradients)
    firsts = {
        at
        for at, position in action.gradients
        if action.results[at][0] == 0
        and num_parameters[at] == 1
        and not (find_gradient_hook(parameters[position]) or _hooks(parameters[position]))
    }
    return [at in firsts and not is_read for at, is_read in enumerate(action.is_read)]


def _has_grouped_gemm(item: Item) -> bool:
    nodes = item.code.nodes if item.code else ()
    return any(map(is_grouped_gemm, nodes))


def _leave_sms(num_sms: int, call: Call, values: list[Any]) -> Sequence[Any]:
    """Call an item's function; its GEMMs leave ``num_sms`` SMs free."""
    with sm_carveout(num_sms):
        return call(values)


def one_after_another(items: Sequence[Item], *, num_microbatches: int) -> list[tuple[int, int]]:
    """Return all (microbatch, item index) pairs in order: one microbatch after another.

    A lane of a divided batch runs up to a sum that needs later lanes; then the next lane runs.
    """
    position = [0] * num_microbatches
    order: list[tuple[int, int]] = []
    while len(order) < num_microbatches * len(items):
        for each in range(num_microbatches):
            while position[each] < len(items) and not find_missing(
                items[position[each]], each, position
            ):
                order.append((each, position[each]))
                position[each] += 1
    return order


def find_missing(item: Item, microbatch: int, position: Sequence[int]) -> list[tuple[int, int]]:
    """Return the needs of an item at which other microbatches' ``position`` has not arrived."""
    needs = item.all_needs(microbatch, len(position))
    return [(each, need) for each, need in needs if position[each] <= need and each != microbatch]


def check_order(items: Sequence[Item], order: Order) -> None:
    """Raise a ``RuntimeError`` unless each microbatch has each item once, after items it needs."""
    num_microbatches = len({microbatch for microbatch, _ in order})
    if sorted(order) != [(m, i) for m in range(num_microbatches) for i in range(len(items))]:
        raise RuntimeError("an order must have each item of each microbatch once")
    done: set[tuple[int, int]] = set()
    for microbatch, index in order:
        needs = items[index].all_needs(microbatch, num_microbatches)
        if missing := [need for need in needs if need not in done]:
            raise RuntimeError(f"item {index} of microbatch {microbatch} must come after {missing}")
        done.add((microbatch, index))


def _run(
    action: Action,
    values: dict[Value, Any],
    gradients: "_Gradients",
    recorder: Recorder | ItemClock,
    num_repeats: int,
) -> None:
    args = take(action, values)
    for _ in range(num_repeats if action.is_graph else 0):
        action.call(args)
    with recorder.span(action.name, stream=action.stream):
        results = action.call(args)
        for at, position in action.gradients:
            gradients.add(
                results[at],
                position=position,
                microbatch=action.results[at][0],
                lasts=bool(action.lasts) and action.lasts[at],
            )
    for value, result, is_read in zip(action.results, results, action.is_read, strict=True):
        if is_read:
            values[value] = result


def _sum(lanes: Lanes, values: list[torch.Tensor]) -> tuple[torch.Tensor]:
    """Add the values of all lanes; or of earlier lanes, whose values come before the lane's own."""
    if lanes == "earlier":
        values[-1] = torch.zeros_like(values[-1])
    return (torch.stack(values).sum(0, dtype=values[0].dtype),)


@final
@dataclass(eq=False)
class _Gradients:
    """Adds a parameter's gradients in the order of microbatches; stores gradients that are early.

    So the sums are bit for bit those of microbatches that run one after another.
    """

    parameters: Sequence[Any]
    lent: list[weakref.ref[torch.Tensor]]  # gets the new ``.grad`` that are no copies
    # Gradients to add after earlier microbatches' gradients, by parameter position and microbatch.
    early: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    next: dict[int, int] = field(default_factory=dict)  # by position: the next microbatch to add

    def add(
        self, gradient: torch.Tensor, *, position: int, microbatch: int, lasts: bool = False
    ) -> None:
        """Add a gradient; if it ``lasts`` until the next step, it may become ``.grad`` itself."""
        early = self.early.setdefault(position, {})
        early[microbatch] = gradient
        while (first := self.next.get(position, 0)) in early:
            lasts_now = lasts and first == microbatch
            self._give(self.parameters[position], early.pop(first), lasts=lasts_now)
            self.next[position] = first + 1

    def _give(self, parameter: torch.Tensor, gradient: torch.Tensor, *, lasts: bool) -> None:
        for change in _hooks(parameter):
            gradient = gradient if (changed := change(gradient)) is None else changed
        if hook := find_gradient_hook(parameter):
            hook(gradient)
            return
        self._accumulate(parameter, gradient, lasts=lasts)
        for after in (parameter._post_accumulate_grad_hooks or {}).values():
            after(parameter)

    def _accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor, *, lasts: bool) -> None:
        if parameter.grad is not None:
            parameter.grad += gradient
        elif lasts and _layout(gradient) == _layout(parameter):
            parameter.grad = gradient.detach()
            self.lent.append(weakref.ref(parameter.grad))
        else:
            # Copy the gradient, because the gradients of two parameters may be one tensor.
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Return the functions of ``Tensor.register_hook``, which may return another gradient."""
    return [*(parameter._backward_hooks or {}).values()]


def _copy_lent(lent: list[weakref.ref[torch.Tensor]]) -> None:
    """Copy gradients of the last step that are still in use to other memory; empty the list."""
    for reference in lent:
        if (gradient := reference()) is not None:
            gradient.data = gradient.clone()
    lent.clear()


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    return value.shape, value.stride(), value.dtype
