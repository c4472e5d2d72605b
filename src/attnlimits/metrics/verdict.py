"""One word a head, by the paper's guidelines (arXiv 2508.17821, section "Discussion")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VERDICTS = ("healthy", "saturated", "vanishing", "sharp")


@dataclass(frozen=True)
class Thresholds:
    """When a head is called what; the first of the three that applies, in this order.

    Attributes:
        sharp: mean Jacobian norm from which gradients are called large. 2.5 = 1/(4T) at T = 0.1: the paper advises
            against T <= 0.1, and 1/(4T) is its bound.
        vanishing_slope: of ln max weight against ln n, at or below which a head vanishes (-1 = as 1/n).
        vanishing_entropy: normalised entropy at or above which it does, whatever the slope.
        saturated: N_s/N at or below which a head no longer tells its top N apart; the paper sees 0.7 to 0.8.
    """

    sharp: float = 2.5
    vanishing_slope: float = -0.9
    vanishing_entropy: float = 0.95
    saturated: float = 0.8


def verdict(slope: Tensor, entropy: Tensor, separability: Tensor, jacobian_norm: Tensor, at: Thresholds) -> Tensor:
    """Index into VERDICTS of every head. What is NaN triggers nothing."""
    answer = torch.zeros(slope.shape, dtype=torch.long, device=slope.device)
    answer = answer.masked_fill(separability <= at.saturated, VERDICTS.index("saturated"))
    vanishes = (slope <= at.vanishing_slope) | (entropy >= at.vanishing_entropy)
    answer = answer.masked_fill(vanishes, VERDICTS.index("vanishing"))
    return answer.masked_fill(jacobian_norm >= at.sharp, VERDICTS.index("sharp"))
