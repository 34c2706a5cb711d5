"""A pytest plug-in that runs tests with Halley's experts and records all outcomes.

With ``--halley STRATEGY``, Halley's function replaces the default experts implementation of
transformers. Halley then runs the experts of every model that selects no implementation, or selects
the default by its name. Transformers still computes experts that no strategy supports. The record
has the number of calls of each kind. It also has the differences between the outputs of Halley and
of transformers on the same inputs, which the suites themselves rarely check. Calls inside of a
compiled graph are not counted.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any


_DEFAULT = "grouped_mm"  # what transformers runs experts by unless another name is given


class Record:
    """The outcome of each test.

    Attributes:
        outcomes: how often each came; those of subtests have names of their own.
        calls: how often experts were run, by what.
        errors: largest difference of an output of Halley's, over the largest expected value, by
            dtype.
        messages: what the first failure said.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.calls: dict[str, Counter[str]] = {}
        self.errors: dict[str, dict[str, float]] = {}
        self.messages: dict[str, str] = {}
        self.test = ""

    def count_call(self, kind: str) -> None:
        self.calls.setdefault(self.test, Counter())[kind] += 1

    def compare(self, found: Any, expected: Any) -> None:
        """Record the difference of two tensors, if it is the largest so far."""
        import torch

        if not expected.numel() or expected.is_meta or not expected.isfinite().all():
            return
        name, least = str(expected.dtype).removeprefix("torch."), torch.finfo(expected.dtype).tiny
        found, expected = found.detach().double(), expected.double()
        error = ((found - expected).abs().max() / expected.abs().max().clamp(min=least)).item()
        errors = self.errors.setdefault(self.test, {})
        errors[name] = max(math.inf if math.isnan(error) else error, errors.get(name, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return  # of setting up and tearing down, only what goes wrong or skips a test counts
        prefix = "subtests " if hasattr(report, "context") else ""
        self.outcomes.setdefault(report.nodeid, Counter())[prefix + report.outcome] += 1
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(crash.message if crash else report.longrepr)
            self.messages.setdefault(report.nodeid, text.partition("\n")[0])

    def write(self, path: Path) -> None:
        parts = ("outcomes", "calls", "errors", "messages")
        text = json.dumps({name: getattr(self, name) for name in parts})
        path.write_text(text, encoding="utf-8")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--halley", default="", help="strategy that runs experts")
    parser.addoption("--activation", default="", help="of models that name none")
    parser.addoption("--record", type=Path, required=True, help="file that gets the outcomes")


def pytest_configure(config: Any) -> None:
    config.halley_record = Record()
    config.pluginmanager.register(config.halley_record)
    if activation := config.getoption("--activation"):
        from transformers import testing_utils

        testing_utils._TEXT_MODEL_TESTER_DEFAULTS["hidden_act"] = activation
    if strategy := config.getoption("--halley"):
        _replace_default(strategy, config.halley_record)


def pytest_unconfigure(config: Any) -> None:
    config.halley_record.write(config.getoption("--record"))


def _replace_default(strategy: str, record: Record) -> None:
    """Replace the default experts implementation of transformers by Halley's function."""
    import torch

    import halley.integrations.transformers as halley_transformers
    from halley.core.timeline import Recorder
    from halley.integrations.contract import find_problem
    from halley.integrations.transformers import find_extension_point
    from halley.integrations.transformers_experts import read_experts
    from halley.strategies.registry import build_strategy

    halley_transformers.enable(strategy=strategy)
    point = find_extension_point()
    interface = point.experts.ExpertsInterface
    run, own = interface()[halley_transformers.NAME], interface()[_DEFAULT]
    device = torch.device("cpu")
    built = build_strategy(strategy, None, recorder=Recorder(device, enabled=False), device=device)

    def watched(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        found = run(experts, hidden_states, top_k_index, top_k_weights)
        if torch.compiler.is_compiling():  # a graph would be made anew for each number
            return found
        top_k = top_k_index.shape[1]
        kind = read_experts(experts, function=run)
        if kind.stacked is None or find_problem(kind.stacked, built, top_k=top_k):
            record.count_call("own arithmetic")
            return found
        record.count_call("halley")
        with torch.no_grad():
            record.compare(found, own(experts, hidden_states, top_k_index, top_k_weights))
        return found

    interface.register(_DEFAULT, watched)
    # A test that compares implementations takes this one by its name, not from the interface.
    point.experts.grouped_mm_experts_forward = watched
