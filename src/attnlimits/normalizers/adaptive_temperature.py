"""Softmax sharpened where its entropy is high."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Normalizer, Properties, masked_softmax

# beta(H), H in nats, highest power first: the polynomial of the source.
COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
LOW_ENTROPY = 0.5


class AdaptiveTemperature(Normalizer, name="adaptive_temperature"):
    """``p = softmax(beta(H) z/T)``, H the entropy of softmax(z/T), beta = max(1, polynomial(H)), 1 for H <= 0.5.

    Source: Velickovic et al. 2024, arXiv 2410.01104, there at inference. No parameters. The polynomial exceeds 1 only
    for H between about 0.85 and 5.94 nats: on near-uniform rows of more than some 380 keys it is plain softmax, just
    where vanishing is worst.
    """

    properties = Properties(
        formula="softmax(beta(H) z)",
        source="Velickovic et al. 2024, arXiv 2410.01104",
        row_sum="one",
        shift_invariant=True,
        sparse=False,
        length_aware=False,
        jacobian_bound="not known",
        near_softmax=False,
    )

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        plain = masked_softmax(logits, mask)
        # p log p is 0 at p = 0, and so are its derivatives here; those of entr are infinite.
        inside = torch.where(plain > 0, plain, 1.0)
        entropy = -(inside * inside.log()).sum(-1, keepdim=True)
        polynomial = torch.zeros_like(entropy)
        for coefficient in COEFFICIENTS:
            polynomial = polynomial * entropy + coefficient
        beta = torch.where(entropy > LOW_ENTROPY, polynomial.clamp(min=1), 1.0)
        return masked_softmax(logits * beta, mask)
