"""Build spans for tests of traces and charts."""

from halley.core.timeline import Span


def span(name: str, start_us: float, end_us: float, stream: str = "compute", rank: int = 0) -> Span:
    return Span(
        name=name, rank=rank, stream=stream, start_us=start_us, duration_us=end_us - start_us
    )
