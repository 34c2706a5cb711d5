"""``halley generate``: continue a text with the model of a training run."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from halley.cli.bench import DeviceOption
from halley.cli.checks import check_range, check_seed
from halley.distributed.mesh import pick_device


def generate(
    run: Annotated[Path, Argument(help="Output folder of halley train.")],
    prompt: Annotated[
        str, Option(help="Text to continue. The model reads its last data.seq_len tokens.")
    ],
    tokens: Annotated[int, Option(help="Most tokens to generate.")] = 200,
    temperature: Annotated[
        float, Option(help="Divisor of the logits; 0 always takes the most probable token.")
    ] = 0.8,
    top_k: Annotated[
        int, Option(help="Choose among this many most probable tokens; 0: among all.")
    ] = 0,
    top_p: Annotated[
        float,
        Option(help="Choose among the most probable tokens whose probabilities add up to this."),
    ] = 1.0,
    seed: Annotated[int, Option(help="Seed of the random choice.")] = 0,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON line: prompt, text, tokens and step.")
    ] = False,
) -> int:
    """Continue a text with the model of a run's newest complete checkpoint.

    Runs in one process. Text and tokens are converted by the run's tokenizer, or are bytes if it
    has none. The text ends early at a token that ends a document.
    """
    check_range(tokens, 1, option="tokens")
    check_range(top_k, 0, option="top-k")
    check_seed(seed)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature ({temperature}) must be finite and at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top-p ({top_p}) must be above 0 and at most 1")
    # Imported here: these modules import torch.distributed.checkpoint, which takes a second.
    from halley.train.generation import Generator, Sampling

    generator = Generator(run, device=pick_device(device))
    prompt_tokens = generator.encode(prompt)
    if not prompt_tokens:
        raise ValueError(f"prompt ({prompt!r}) must have at least one token")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    generated = generator.generate(prompt_tokens, num_tokens=tokens, sampling=sampling)
    text = generator.decode(generated, prompt=prompt_tokens)
    if as_json:
        record = {"prompt": prompt, "text": text, "tokens": generated, "step": generator.step}
        typer.echo(json.dumps(record))
    else:
        # A control character, such as escape, could change the state of a terminal.
        typer.echo(
            "".join(
                c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
            )
        )
    return 0
