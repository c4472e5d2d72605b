"""alpha-entmax against bisection in float64, against its limits, and its derivative by alpha."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnlimits.normalizers.entmax import entmax


def bisected(row: Tensor, alpha: float) -> Tensor:
    """tau by bisection, straight from the definition."""
    y, q = (alpha - 1) * row, 1 / (alpha - 1)
    low, high = y.max() - 1, y.max()
    for _ in range(200):
        tau = (low + high) / 2
        low, high = (tau, high) if ((y - tau).clamp(min=0) ** q).sum() > 1 else (low, tau)
    return (y - low).clamp(min=0) ** q


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(-6, 6), min_size=1, max_size=12), st.floats(1.05, 2.0))
def test_entmax_is_the_definition(row: list[float], alpha: float) -> None:
    logits = torch.tensor(row, dtype=torch.float64)
    torch.testing.assert_close(entmax(logits[None], alpha)[0], bisected(logits, alpha), atol=1e-9, rtol=0)


FAMILIES = ("normal", "tiny normal", "constant", "linear", "heavy tail", "one outlier")


def long_rows(family: str) -> Tensor:
    generator, n = torch.Generator().manual_seed(0), 1024
    noise = torch.randn(4, n, generator=generator, dtype=torch.float64)
    return {
        "normal": noise,
        "tiny normal": noise * 0.01,
        "constant": torch.zeros(4, n, dtype=torch.float64),
        "linear": torch.linspace(-1, 1, n, dtype=torch.float64).expand(4, n),
        "heavy tail": noise / noise.roll(1, -1),
        "one outlier": noise + 1e4 * (torch.arange(n) == 3),
    }[family]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alpha", [1.1, 1.25, 1.5, 1.75, 2.0])
def test_float32_is_as_exact_as_float32_can_be(family: str, alpha: float) -> None:
    rows = long_rows(family)
    exact = torch.stack([bisected(row, alpha) for row in rows])
    torch.testing.assert_close(entmax(rows, alpha), exact, atol=1e-12, rtol=0)
    single = rows.float()
    exact_of_single = torch.stack([bisected(row, alpha) for row in single.double()])
    assert (entmax(single, alpha).double() - exact_of_single).abs().max() < 2e-6


def test_alpha_1_is_softmax_and_sparsemax_is_the_limit() -> None:
    rows = long_rows("normal")
    assert torch.equal(entmax(rows, 1.0), torch.softmax(rows, -1))
    torch.testing.assert_close(entmax(rows, 2.0), entmax(rows, torch.tensor(2.0 - 1e-12).double()), atol=1e-9, rtol=0)


def test_derivative_by_alpha_near_one() -> None:
    """-1/2 (diag p - p p^T) (ln p)^2 in the limit: 0.385154 for z = [0, 0, 1] and gradient [1, 2, 3]."""
    for dtype in (torch.float32, torch.float64):
        alpha = torch.tensor([[[1.0001]]], dtype=dtype, requires_grad=True)
        weights = entmax(torch.tensor([[[0.0, 0.0, 1.0]]], dtype=dtype), alpha)
        (weights * torch.tensor([1.0, 2.0, 3.0], dtype=dtype)).sum().backward()
        assert alpha.grad.item() == pytest.approx(0.385154, rel=2e-3)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.9])
def test_gradients_by_logits_and_alpha(alpha: float) -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    per_head = torch.tensor([alpha, 1.4], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    assert torch.autograd.gradcheck(entmax, (logits, per_head))
    assert torch.autograd.gradgradcheck(lambda z: entmax(z, alpha), (logits,))
