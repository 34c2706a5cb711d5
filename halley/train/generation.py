"""Continue a text with the model of a run's newest checkpoint, on one process."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, final

import torch

from halley.core.config import RunConfig
from halley.core.timeline import Recorder
from halley.core.types import DTYPES
from halley.distributed.mesh import ParallelGroups
from halley.moe.layer import grouped_experts
from halley.moe.router import SigmoidRouter
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategy
from halley.train.checkpoint import find_newest_checkpoint, load_checkpoint
from halley.train.checkpoint_reader import checkpoint_tensors
from halley.train.data import BYTES, NUM_BYTE_VALUES
from halley.train.hf_export import read_run_config
from halley.train.manifest import read_manifest
from halley.train.tokenizer import Tokenizer, load_tokenizer
from halley.train.trainer import CHECKPOINTS_FOLDER


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How ``Generator.generate`` chooses the next token.

    Attributes:
        temperature: divides the logits; 0 chooses the token with the largest logit.
        top_k: choose among the ``top_k`` most probable tokens; 0: among all.
        top_p: choose among the fewest most probable tokens whose probabilities add up to ``top_p``.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@final
class Generator:
    """The model of a run's newest complete checkpoint, with the run's tokenizer, on one device.

    ``ValueError`` if ``folder`` is no output folder of a run, has no complete checkpoint, or the
    run's tokenizer cannot be read.
    """

    def __init__(self, folder: Path, *, device: torch.device) -> None:
        config = read_run_config(folder)
        checkpoint = find_newest_checkpoint(folder / CHECKPOINTS_FOLDER)
        if checkpoint is None:
            rule = f"hold a whole checkpoint in {CHECKPOINTS_FOLDER}/"
            raise ValueError(f"run ({folder}) must {rule}")
        self.tokenizer = _find_tokenizer(config, checkpoint)
        self.model = _build_model(config, device)
        self.step = _load_model(checkpoint, self.model)
        self.context_size = config.data.seq_len
        self._device = device

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text: by the run's tokenizer, or else its bytes."""
        if self.tokenizer is None:
            return list(text.encode("utf-8"))
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int], *, prompt: list[int]) -> str:
        """Return the text of tokens that follow a prompt; U+FFFD replaces bytes that are no text.

        Some tokenizers write a space only between tokens, so the prompt is decoded as well.
        """
        if self.tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        backend = self.tokenizer.backend
        before = backend.decode(prompt, skip_special_tokens=False)
        return backend.decode([*prompt, *tokens], skip_special_tokens=False)[len(before) :]

    @torch.no_grad()
    def generate(self, prompt: list[int], *, num_tokens: int, sampling: Sampling) -> list[int]:
        """Return ``num_tokens`` tokens, or fewer if a token ends the document before.

        The model reads the last ``context_size`` tokens of prompt and result. It computes all of
        them again for each new token.
        """
        random = torch.Generator().manual_seed(sampling.seed)
        tokens = list(prompt)
        with self._without_compiler():
            for _ in range(num_tokens):
                context_BS = torch.tensor([tokens[-self.context_size :]], device=self._device)
                logits_V = self.model(context_BS).logits_BSV[0, -1].cpu()
                token = _choose_token(logits_V[: self._vocab_size], sampling, random=random)
                if token == self._end_of_text:
                    break
                tokens.append(token)
        return tokens[len(prompt) :]

    def _without_compiler(self) -> AbstractContextManager[object]:
        # Inductor would take longer to compile parts of the model for a GPU than these run.
        on_gpu = self._device.type == "cuda"
        return torch.compiler.set_stance("force_eager") if on_gpu else nullcontext()

    @property
    def _vocab_size(self) -> int:  # the model's vocabulary may be larger
        return NUM_BYTE_VALUES if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def _end_of_text(self) -> int | None:
        if self.tokenizer is None:
            return 0  # the zero byte between two files of the training text
        name = self.tokenizer.end_of_text
        return None if name is None else self.tokenizer.backend.token_to_id(name)


def _choose_token(logits_V: torch.Tensor, sampling: Sampling, *, random: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    sorted_V, token_V = logits_V.double().sort(descending=True, stable=True)
    p_V = ((sorted_V - sorted_V[0]) / sampling.temperature).softmax(0)
    if sampling.top_k:
        p_V[sampling.top_k :] = 0.0
    if sampling.top_p < 1:
        p_V[p_V.cumsum(0) - p_V >= sampling.top_p * p_V.sum()] = 0.0
    return int(token_V[torch.multinomial(p_V, 1, generator=random)])


def _find_tokenizer(config: RunConfig, checkpoint: Path) -> Tokenizer | None:
    """Return the tokenizer of a run, or None if its tokens are bytes."""
    data = read_manifest(checkpoint).notes.get("data")
    saved = cast(dict[str, object], data)["tokenizer_checksum"] if isinstance(data, dict) else BYTES
    if saved == BYTES:
        return None
    path = Path(config.data.tokenizer or config.data.path or "")
    tokenizer = load_tokenizer(path)
    if tokenizer.checksum != saved:
        raise ValueError(f"tokenizer ({path}) must be unchanged since the run wrote {checkpoint}")
    return tokenizer


def _build_model(config: RunConfig, device: torch.device) -> MoETransformer:
    recorder = Recorder(device, enabled=False)
    strategy = build_strategy("sequential", None, recorder=recorder, device=device)
    run = {"strategy": strategy, "groups": ParallelGroups(), "recorder": recorder}
    dtype, model = DTYPES[config.train.dtype], config.model
    if model.moe.router.capacity_factor:
        # Capacity for all tokens: a dropped last token would get no output of experts.
        router = replace(model.moe.router, capacity_factor=float(model.moe.num_experts))
        model = replace(model, moe=replace(model.moe, router=router))
    return MoETransformer(model, dtype=dtype, device=device, **run).eval()


def _load_model(checkpoint: Path, model: MoETransformer) -> int:
    """Copy a checkpoint's weights, and biases of sigmoid routers, to a model; return its step."""
    parameters = dict(model.named_parameters())
    # Checkpoints hold float32 weights, whatever the dtype of the model.
    values = {name: torch.empty(each.shape) for name, each in parameters.items()}
    stored = checkpoint_tensors(values, grouped_experts(model), groups=ParallelGroups())
    routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
    biases = {str(index): router.bias for index, router in enumerate(routers)}
    state: dict[str, object] = {"parameters": stored}
    if biases:
        state["router_bias"] = biases
    step = load_checkpoint(checkpoint, state)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    return step
