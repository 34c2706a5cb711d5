"""Evaluation loss: the mean loss of a model on text that the run does not train on."""

import torch
import torch.distributed as dist

from halley.train.step import TrainingRun


@torch.no_grad()
def evaluate(run: TrainingRun) -> float:
    """Return the mean next-token cross-entropy of the evaluation text, nats per token. Collective.

    Each call reads the same windows: the first of the text, in at most ``data.eval_batches``
    batches of ``train.batch_size`` windows on each rank. Batches are smaller only if the text is
    shorter than one batch of all ranks. All batches have the same size, so windows that do not fill
    a last batch are left out. The model runs uncompiled: a graph for inference would take one more
    compilation.
    """
    corpus, world = run.eval_corpus, run.world
    assert corpus is not None
    batch_size = min(run.config.train.batch_size, corpus.num_windows // world.num_ranks)
    num_windows = batch_size * world.num_ranks
    num_batches = min(run.config.data.eval_batches, corpus.num_windows // num_windows)
    total = torch.zeros((), device=world.device)
    with run.recorder.paused():
        for batch in range(num_batches):
            first = batch * num_windows + world.rank * batch_size
            tokens_BS, targets_BS = corpus.read_batch(range(first, first + batch_size))
            device = world.device
            total += run.model.losses(tokens_BS.to(device), targets_BS.to(device)).loss
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / (num_batches * world.num_ranks)
