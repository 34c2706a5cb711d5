"""Routing made to order: expert loads of a given skew, and tokens drawn from them."""

import math

import torch

from halley.core.field_types import show_name
from halley.core.types import Routing


def balanced_load(num_experts: int) -> torch.Tensor:
    """Return the share of routed rows of each expert when all are alike, ``(E,)`` float64."""
    return torch.full((num_experts,), 1.0 / num_experts, dtype=torch.float64)


def load_with_std(num_experts: int, *, std: float, top_k: int) -> torch.Tensor:
    """Return shares whose standard deviation over the experts is ``std``.

    The shares fall linearly from the first expert to the last, as far as that keeps each of them
    at or above zero and at or below ``1 / top_k`` (a token picks an expert once).

    Source: COMET (arXiv:2502.19811), Fig. 14: imbalance as the standard deviation of the experts'
    share of tokens; 0 is uniform, 0.032 the mean of a production cluster (E=8, top_k=2).

    Raises:
        ValueError: no linear load has so large a deviation.
    """
    ramp_E = torch.linspace(1.0, -1.0, num_experts, dtype=torch.float64)
    deviation = float(ramp_E.std(correction=0)) if num_experts > 1 else 1.0
    load_E = balanced_load(num_experts) + std * ramp_E / deviation
    largest = min(1.0 / num_experts, 1.0 / top_k - 1.0 / num_experts) * deviation
    if std < 0 or std > largest + 1e-12:
        raise ValueError(
            f"std ({std}) must be between 0 and {largest:.4f} for num_experts {num_experts} "
            f"and top_k {top_k}"
        )
    return load_E


def zipf_load(num_experts: int, *, exponent: float, top_k: int) -> torch.Tensor:
    """Return shares proportional to ``1 / (rank of the expert) ** exponent``.

    A share is capped at ``1 / top_k``; what the cap cuts off goes to the others in proportion.

    Raises:
        ValueError: the exponent is negative.
    """
    if exponent < 0:
        raise ValueError(f"exponent ({exponent}) must be at least 0")
    place_E = torch.arange(1, num_experts + 1, dtype=torch.float64)
    return _cap(place_E.pow(-exponent), cap=1.0 / top_k)


def one_hot_load(num_experts: int, *, top_k: int, hot_expert: int = 0) -> torch.Tensor:
    """Return shares such that every token picks ``hot_expert``; the others share the rest."""
    if num_experts == 1:
        return torch.ones(1, dtype=torch.float64)
    rest = (1.0 - 1.0 / top_k) / (num_experts - 1)
    load_E = torch.full((num_experts,), rest, dtype=torch.float64)
    load_E[hot_expert] = 1.0 / top_k
    return load_E


def parse_load(text: str, *, num_experts: int, top_k: int) -> torch.Tensor:
    """Return the load that a word names, such as "balanced", "std:0.032", "zipf:1.2" or "one-hot".

    "cv:0.256" is a standard deviation of 0.256 times the mean share, the same as "std:0.032" for 8
    experts, and as uneven for any other number of them.

    Raises:
        ValueError: the word names no load, or its number is not one.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")
    kind, _, number = text.partition(":")
    if kind in ("balanced", "one-hot") and not number:
        if kind == "balanced":
            return balanced_load(num_experts)
        return one_hot_load(num_experts, top_k=top_k)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if kind == "std" and math.isfinite(value):
        return load_with_std(num_experts, std=value, top_k=top_k)
    if kind == "cv" and math.isfinite(value):
        return load_with_std(num_experts, std=value / num_experts, top_k=top_k)
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
    """Draw ``top_k`` different experts for each token, each expert with its share of the rows.

    Systematic sampling: on a line where expert e covers ``top_k * load_E[e]``, in an order drawn
    for each token, the points u, u + 1, ... hit ``top_k`` different experts, each with exactly
    the wished probability. Weights are uniform in (0, 1), normalised over each token.

    Source: W. G. Madow, "On the theory of systematic sampling, II", Ann. Math. Stat. 20 (1949).

    Args:
        load_E: shares of the routed rows, summing to 1, none above ``1 / top_k``.
        generator: a CPU generator; the same seed gives the same routing on every device.

    Raises:
        ValueError: the shares do not allow ``top_k`` different experts a token.
    """
    num_experts = load_E.numel()
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")
    if float(load_E.max()) * top_k > 1.0 + 1e-9:
        raise ValueError(
            f"load ({float(load_E.max()):.4f} for one expert) must be at most 1 / top_k "
            f"({1 / top_k:.4f})"
        )
    order_TE = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    covered_TE = (load_E.to(torch.float64) * top_k)[order_TE].cumsum(1)
    covered_TE *= top_k / covered_TE[:, -1:]
    start_T1 = torch.rand(num_tokens, 1, generator=generator, dtype=torch.float64)
    points_TK = start_T1 + torch.arange(top_k, dtype=torch.float64)
    place_TK = torch.searchsorted(covered_TE, points_TK, right=True).clamp_max(num_experts - 1)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator).clamp_min(1e-3)
    weights_TK /= weights_TK.sum(1, keepdim=True)
    return Routing(
        topk_idx_TK=order_TE.gather(1, place_TK).to(device),
        topk_weights_TK=weights_TK.to(device),
    )


def _cap(weight_E: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Scale weights to shares of sum 1, none above ``cap``."""
    capped_E = torch.zeros_like(weight_E, dtype=torch.bool)
    share_E = weight_E / weight_E.sum()
    while bool((share_E > cap * (1 + 1e-12)).any()):
        capped_E |= share_E > cap
        free = 1.0 - cap * int(capped_E.sum())
        share_E = torch.where(capped_E, cap, weight_E * free / weight_E[~capped_E].sum())
    return share_E
