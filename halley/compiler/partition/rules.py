"""The table of rules by which a batch comes in parts."""

from collections.abc import Mapping

from halley.compiler.partition.axes import Rule
from halley.compiler.partition.math_rules import MATH_RULES
from halley.compiler.partition.row_rules import ROW_RULES
from halley.compiler.partition.view_rules import VIEW_RULES


def all_rules(own: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules of torch's operators and Halley's, with a user's own, which win."""
    return {**VIEW_RULES, **MATH_RULES, **ROW_RULES, **own}
