"""Softmax whose temperature follows the length of the row, without parameters to train."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Normalizer, Properties, masked_softmax, visible_keys

VARIANTS = ("log", "yarn", "critical")


class LogLength(Normalizer, name="log_length"):
    """``p = softmax(f(n) z / T)``, n = visible keys of the row.

    ========  ======================================  ==========================================================
    variant   f(n)                                    source
    ========  ======================================  ==========================================================
    log       ln n / ln n_train                       Su 2021; Chiang & Cholak 2022, arXiv 2202.12172
    yarn      (1 + 0.1 ln max(1, n / n_train))^2      Peng et al. 2023, arXiv 2309.00071: the factor of q and k
    critical  gamma ln n                              Chen et al. 2025, arXiv 2510.05554
    ========  ======================================  ==========================================================

    Works against vanishing: a key that leads all others by enough keeps its weight as the row grows. It does not change
    what a row of given length separates, nor bound the gradient, which grows by the same factor.

    Args:
        variant: one of the three.
        n_train: row length at which log and yarn are plain softmax; None = the training context.
        gamma: of critical; the theory's threshold is 1 / (1 - rho) for tokens of pairwise cosine rho.
    """

    properties = Properties(
        formula="softmax(f(n) z)",
        source="Su 2021; Peng et al. 2023, arXiv 2309.00071; Chen et al. 2025, arXiv 2510.05554",
        row_sum="one",
        shift_invariant=True,
        sparse=False,
        length_aware=True,
        jacobian_bound="f(n) / 2",
        near_softmax=True,
    )
    rescales_rows = True

    def __init__(
        self,
        *,
        variant: str = "log",
        n_train: int | None = None,
        gamma: float = 1.0,
        T: float = 1.0,
        n_heads: int = 1,
        context_length: int = 1024,
    ) -> None:
        super().__init__(T=T, n_heads=n_heads, context_length=context_length)
        if variant not in VARIANTS:
            raise ValueError(f"normalizer.variant={variant}: must be one of {', '.join(VARIANTS)}")
        self.variant, self.gamma = variant, gamma
        self.n_train = max(2, context_length if n_train is None else n_train)

    def row_scale(self, n_visible: Tensor) -> Tensor:
        n = n_visible.clamp(min=1).to(torch.float64)
        if self.variant == "log":
            return n.log() / math.log(self.n_train)
        if self.variant == "yarn":
            return (1 + 0.1 * (n / self.n_train).clamp(min=1).log()) ** 2
        return self.gamma * n.log()

    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        scale = self.row_scale(visible_keys(logits, mask)).to(logits.dtype)
        return masked_softmax(logits * scale[..., None], mask)
