"""A layer of experts by each way to hide its communication, predicted: which of them is fastest."""

from collections.abc import Sequence

from halley.compiler import OrderReport
from halley.core.config import RunConfig
from halley.core.types import DTYPES, LayerShape
from halley.cost.hardware import Hardware
from halley.cost.predict import Predictor
from halley.cost.simulate import makespan_us
from halley.strategies.chunked import choose_num_chunks
from halley.strategies.sketch import fused_tasks, pipeline_tasks


# As knobs have it by default. Not from there: kernels must be imported ahead of Triton, and plans
# come with torch's compiler, which imports it.
_CHUNK_COLUMNS = 512


def layer_times(
    config: RunConfig,
    reports: Sequence[OrderReport],
    *,
    passes: str,
    num_ranks: int,
    hardware: Hardware,
) -> dict[str, float]:
    """Return microseconds of forward and backward of one layer of experts, the fastest first.

    Strategies by their own sketches. With passes, a layer takes what "sequential" does less its
    share of what the passes take off the graphs. A model runs all of its layers in one way.

    Args:
        config: model, batch, dtype and ``ep_size`` of the run.
        reports: of the run's graphs.
        passes: that the reports are of.
        num_ranks: of the run.
        hardware: whose figures times are predicted from.
    """
    model = config.model
    shape = LayerShape(
        num_tokens=config.train.batch_size * config.data.seq_len,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe.intermediate_size,
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        ep_size=config.ep_size or num_ranks,
        itemsize=DTYPES[config.train.dtype].itemsize,
        activation=model.moe.activation,
    )
    predictor = Predictor(hardware)
    num_chunks = choose_num_chunks(shape, predictor)
    tasks = {
        "sequential": pipeline_tasks(shape, predictor, num_chunks=1),
        f"chunked:{num_chunks}": pipeline_tasks(shape, predictor, num_chunks=num_chunks),
        "fused": fused_tasks(shape, predictor, chunk_columns=_CHUNK_COLUMNS, fused=True),
    }
    found = {name: makespan_us(each) for name, each in tasks.items()}
    gain_us = sum(each.time_before.makespan_us - each.time_after.makespan_us for each in reports)
    num_layers = sum(map(model.is_moe_layer, range(model.num_layers)))
    found[f"functional, {passes}"] = found["sequential"] - gain_us / num_layers
    return dict(sorted(found.items(), key=lambda item: item[1]))
