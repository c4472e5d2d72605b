"""The functional form: any shape, any dim, a mask, and gradients."""

from __future__ import annotations

import pytest
import torch

from attnlimits.normalizers import REGISTRY, functional, make_normalizer


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_function_is_the_module_along_any_dim(name: str, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, 5, generator=generator) > 0.3
    module = make_normalizer({"name": name}, T=0.5, n_heads=1, context_length=1024)
    expected = module(logits.movedim(dim, -1)[:, None], mask.movedim(dim, -1)[:, None])[:, 0].movedim(-1, dim)
    torch.testing.assert_close(getattr(functional, name)(logits, mask, dim=dim, T=0.5), expected)


def test_one_row_and_its_gradient() -> None:
    row = torch.tensor([1.0, 0.5, -3.0], requires_grad=True)
    weights = functional.sparsemax(row)
    assert weights.tolist() == [0.75, 0.25, 0.0]
    weights[0].backward()
    assert row.grad.tolist() == [0.5, -0.5, 0.0]


def test_options_and_unknown_names() -> None:
    two = functional.top_k(torch.tensor([3.0, 1.0, 2.0]), k=2)
    assert (two > 0).tolist() == [True, False, True]
    assert "entmax15" in dir(functional)
    with pytest.raises(AttributeError, match="sparsmax"):
        functional.sparsmax  # noqa: B018
