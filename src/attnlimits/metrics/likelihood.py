"""Loss and perplexity of a language model, weighted by tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric


def token_nll(logits_BxLxV: Tensor, targets_BxL: Tensor) -> Tensor:
    """Negative log-likelihood of every target, (B, L), in nats, float32 or better."""
    logits = logits_BxLxV.to(torch.promote_types(logits_BxLxV.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets_BxL.flatten(), reduction="none").view_as(targets_BxL)


def perplexity(nll: float) -> float:
    """exp(nll), inf where that overflows."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


class TokenLikelihood(Metric):
    """Mean negative log-likelihood a token: a float64 sum over a token count, over all batches and ranks.

    Perplexity is exp of this mean, never a mean of exponentials: it does not depend on how blocks fall into batches.
    """

    full_state_update = False
    nll_sum: Tensor
    n_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll_BxL: Tensor) -> None:
        # Not in place: the states may have been made under inference mode, which forbids that outside of it.
        self.nll_sum = self.nll_sum + nll_BxL.detach().double().sum()
        self.n_tokens = self.n_tokens + nll_BxL.numel()

    def compute(self) -> Tensor:
        """Nats a token; NaN before the first update."""
        return self.nll_sum / self.n_tokens
