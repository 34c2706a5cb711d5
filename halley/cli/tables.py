"""Tables for people: how measurements and parts of a step look on a terminal."""

from rich.table import Table

from halley.perf.results import Row


def layer_table(rows: list[Row]) -> Table:
    """Return the result lines of the layer benchmark, one row each, times in microseconds."""
    gpu, count = rows[0]["gpu"], rows[0]["num_gpus"]
    table = Table(
        title=f"MoE layer on {count} x {gpu}: slowest rank, microseconds",
        caption="floor: the bare GEMMs or the wire, whichever is larger",
    )
    for name in ("model", "tokens", "skew", "direction", "strategy"):
        table.add_column(name)
    for name in ("median", "p10-p90", "floor", "x floor", "exposed", "MiB", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        setting = f" {row['setting']}" if row["setting"] else ""
        median, floor = row["median_us"], row["floor_us"]
        table.add_row(
            str(row["model"]),
            str(row["num_tokens"]),
            str(row["skew"]),
            str(row["direction"]).replace("_", "+"),
            f"{row['strategy']}{setting}",
            _number(median) if median else "wrong values",
            f"{_number(row['p10_us'])}-{_number(row['p90_us'])}" if median else "",
            _number(floor),
            f"{_float(median) / _float(floor):.2f}" if median else "",
            _number(row["exposed_comm_us"]),
            _number(row["peak_mib"]),
            f"{_float(row['max_rel_err']):.1e}" + (" =" if row["bit_equal"] else ""),
        )
    return table


def _number(value: object) -> str:
    return "" if value is None else f"{_float(value):,.0f}"


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
