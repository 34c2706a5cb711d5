"""The dynamic programme over ranges by hand; against all divisions of graphs in test_partition."""

import pytest

from halley.compiler.partition.ranges import Choice, ChosenRange, choose_parts, choose_ranges


@pytest.mark.parametrize(
    ("prices", "want"),
    [
        ({2: 80.0, 4: 70.0, 8: 90.0}, Choice(4, 70.0)),
        ({2: 110.0, 4: 120.0, 8: 10.0}, Choice(1, 100.0)),  # 8 is not tried: 4 costs more than 2
        ({2: 120.0, 4: 90.0}, Choice(4, 90.0)),  # 2 costs more than the whole, and still less to go
        ({2: 100.0}, Choice(1, 100.0)),  # equals stay whole
        ({}, Choice(1, 100.0)),
    ],
)
def test_search_for_parts_ends_at_the_first_that_costs_more(prices, want) -> None:
    assert choose_parts(100.0, prices, prices.__getitem__) == want


def test_ranges_by_hand() -> None:
    # Four items of 10 us. Items 1 and 2 together cost 12 in two parts, 0 to 2 cost 24 in four.
    prices = {(1, 3): Choice(2, 12.0), (0, 3): Choice(4, 24.0), (0, 4): Choice(8, 1.0)}

    def choose(first: int, end: int) -> Choice:
        return prices.get((first, end), Choice(1, 10.0 * (end - first)))

    assert choose_ranges(4, max_items=3, choose=choose) == [ChosenRange(1, 3, 2)]
    assert choose_ranges(4, max_items=4, choose=choose) == [ChosenRange(0, 4, 8)]
    assert choose_ranges(4, max_items=1, choose=choose) == []
    assert choose_ranges(0, max_items=3, choose=choose) == []
