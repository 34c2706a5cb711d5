"""Draw random routing for a given load: each expert's share of all routed rows (K per token)."""

import math

import torch

from halley.core.types import Routing
from halley.core.validation import show_name


def balanced_load(num_experts: int) -> torch.Tensor:
    """Return equal shares of the routed rows for all experts, ``(E,)`` float64."""
    return torch.full((num_experts,), 1.0 / num_experts, dtype=torch.float64)


def load_with_std(num_experts: int, *, std: float, top_k: int) -> torch.Tensor:
    """Return shares of routed rows, falling linearly by expert id, with standard deviation ``std``.

    A share lies between 0 and ``1 / top_k``, because a token chooses an expert at most once. A
    ``std`` that no linear load has is a ``ValueError``.

    Source: COMET (arXiv:2502.19811), Fig. 14, which measures imbalance as the standard deviation of
    the experts' shares of tokens. There, 0 is uniform, and 0.032 is the mean of a production
    cluster with 8 experts and top-2.
    """
    ramp_E = torch.linspace(1.0, -1.0, num_experts, dtype=torch.float64)
    deviation = float(ramp_E.std(correction=0)) if num_experts > 1 else 1.0
    load_E = balanced_load(num_experts) + std * ramp_E / deviation
    largest = min(1.0 / num_experts, 1.0 / top_k - 1.0 / num_experts) * deviation
    if std < 0 or std > largest + 1e-12:
        rule = f"between 0 and {largest:.4f} for num_experts {num_experts} and top_k {top_k}"
        raise ValueError(f"std ({std}) must be {rule}")
    return load_E


def zipf_load(num_experts: int, *, exponent: float, top_k: int) -> torch.Tensor:
    """Return experts' row shares, proportional to ``(1 + id) ** -exponent`` but at most 1 / top_k.

    The excess of larger shares is divided among the other experts, in proportion to their shares.
    """
    if exponent < 0:
        raise ValueError(f"exponent ({exponent}) must be at least 0")
    place_E = torch.arange(1, num_experts + 1, dtype=torch.float64)
    weight_E, cap = place_E.pow(-exponent), 1.0 / top_k
    capped_E = torch.zeros_like(weight_E, dtype=torch.bool)
    share_E = weight_E / weight_E.sum()
    # Capping a share raises the others, which may then exceed the cap: repeat until none does.
    while bool((share_E > cap * (1 + 1e-12)).any()):
        capped_E |= share_E > cap
        rest = 1.0 - cap * int(capped_E.sum())
        share_E = torch.where(capped_E, cap, weight_E * rest / weight_E[~capped_E].sum())
    return share_E


def one_hot_load(num_experts: int, *, top_k: int) -> torch.Tensor:
    """Return row shares if each token chooses expert 0 and the others share the rest equally."""
    rest = (1.0 - 1.0 / top_k) / max(1, num_experts - 1)
    load_E = torch.full((num_experts,), rest, dtype=torch.float64)
    load_E[0] = 1.0 / top_k
    return load_E


def parse_load(text: str, *, num_experts: int, top_k: int) -> torch.Tensor:
    """Return experts' row shares for the text "balanced", "one-hot", "std:X", "cv:X" or "zipf:X".

    "cv" is the standard deviation over the mean share. For 8 experts "cv:0.256" equals "std:0.032",
    and it is equally uneven for any other number of experts. Other texts are a ``ValueError``.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")
    kind, _, number = text.partition(":")
    if kind == "balanced" and not number:
        return balanced_load(num_experts)
    if kind == "one-hot" and not number:
        return one_hot_load(num_experts, top_k=top_k)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if kind in ("std", "cv") and math.isfinite(value):
        std = value if kind == "std" else value / num_experts
        return load_with_std(num_experts, std=std, top_k=top_k)
    if kind == "zipf" and math.isfinite(value):
        return zipf_load(num_experts, exponent=value, top_k=top_k)
    raise ValueError(
        f"skew ({show_name(text)}) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot"
    )


def sample_routing(
    load_E: torch.Tensor,
    num_tokens: int,
    *,
    top_k: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Routing:
    """Draw ``top_k`` different experts for each token, with ``load_E`` as expected shares of rows.

    Uses systematic sampling. For each token, the experts lie on a line in random order, and expert
    e covers the length ``top_k * load_E[e]``. The points u, u + 1, ... with a random u in [0, 1)
    hit ``top_k`` different experts, each with exactly the required probability. Routing weights are
    uniform in (0, 1) and normalised over each token.

    Example: with top-2 and shares (1/2, 1/4, 1/4), the experts cover [0, 1), [1, 1.5) and
    [1.5, 2). With u = 0.6 the points 0.6 and 1.6 hit experts 0 and 2.

    Source: W. G. Madow, "On the theory of systematic sampling, II", Ann. Math. Stat. 20 (1949).

    Args:
        load_E: shares of routed rows; they sum to 1. One above ``1 / top_k`` is a ``ValueError``.
        generator: on the CPU, so that the same seed gives the same routing on every device.
    """
    if (load := float(load_E.max())) * top_k > 1.0 + 1e-9:
        rule = f"at most 1 / top_k ({1 / top_k:.4f})"
        raise ValueError(f"load ({load:.4f} for one expert) must be {rule}")
    order_TE = torch.rand(num_tokens, load_E.numel(), generator=generator).argsort(1)
    covered_TE = (load_E.to(torch.float64) * top_k)[order_TE].cumsum(1)
    covered_TE *= top_k / covered_TE[:, -1:]  # each row ends at top_k, except for rounding
    start_T1 = torch.rand(num_tokens, 1, generator=generator, dtype=torch.float64)
    points_TK = start_T1 + torch.arange(top_k, dtype=torch.float64)
    place_TK = torch.searchsorted(covered_TE, points_TK, right=True).clamp_max(load_E.numel() - 1)
    # Weights are not near 0, so a wrong output of any chosen expert changes the result noticeably.
    weights_TK = torch.rand(num_tokens, top_k, generator=generator).clamp_min(1e-3)
    weights_TK /= weights_TK.sum(1, keepdim=True)
    return Routing(
        topk_idx_TK=order_TE.gather(1, place_TK).to(device), topk_weights_TK=weights_TK.to(device)
    )
