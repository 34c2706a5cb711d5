"""``halley tokenize``: write the tokens of text once, for ``data.path`` of ``halley train``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from typer import Argument, Option

from halley.cli.ranks import step_progress
from halley.train.text_files import find_text_files, read_pieces
from halley.train.token_files import write_tokens
from halley.train.tokenizer import load_tokenizer


_PROGRESS_TOKENS = 100_000  # tokens between two calls that show progress: a call takes 1 ms


def tokenize(
    text: Annotated[
        Path,
        Argument(
            help="Text file, .jsonl file with the key text, .parquet file with the column text, or "
            "a folder of such files."
        ),
    ],
    output: Annotated[Path, Argument(help="Folder for the tokens; it must be empty or not exist.")],
    tokenizer: Annotated[
        Path, Option(help="tokenizer.json of the library tokenizers, or a folder with one.")
    ],
) -> int:
    """Write the tokens of text to a folder, which `halley train --data` reads.

    The folder gets numpy files of 16-bit or 32-bit integers, a copy of the tokenizer, and
    tokens.json. If the vocabulary has an end-of-text token, that token follows each document.
    Prints one JSON line with the name of that token, or null.
    """
    model = load_tokenizer(tokenizer)
    files = find_text_files(text)
    num_tokens = 0

    with step_progress() as on_progress:

        def batches() -> Iterator[np.ndarray]:
            nonlocal num_tokens
            for tokens in model.encode(read_pieces(files)):
                if num_tokens // _PROGRESS_TOKENS < (num_tokens + tokens.size) // _PROGRESS_TOKENS:
                    on_progress("tokens", num_tokens + tokens.size, 0)
                num_tokens += tokens.size
                yield tokens

        info = write_tokens(batches(), output, tokenizer=model)
    facts = {"num_tokens": num_tokens, "vocab_size": info.vocab_size}
    typer.echo(json.dumps({"output": str(output), "end_of_text": info.end_of_text} | facts))
    return 0
