"""The solver: the compiled way against the eager one, and both against the package entmax."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import entmax as package
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnlimits.normalizers import functional, newton


@pytest.fixture
def _eager_again() -> Iterator[None]:
    torch.compiler.reset()
    yield
    newton.set_compile("off")


def rows(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "options"), [("sparsemax", {}), ("entmax15", {}), ("entmax", {"alpha": 1.3})])
def test_values_and_gradients_are_those_of_the_package(name: str, options: dict, dim: int, masked: bool) -> None:
    logits, grad = rows(7, 9, 5, scale=2.0), rows(7, 9, 5)
    mask = torch.rand(7, 9, 5, generator=torch.Generator().manual_seed(2)) > 0.4
    mask.select(dim, 0).fill_(True)  # the package cannot take a row without visible keys
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    filled = theirs.masked_fill(~mask, -torch.inf) if masked else theirs
    if options:
        expected = package.entmax_bisect(filled, alpha=options["alpha"], dim=dim, n_iter=80)
    else:
        expected = getattr(package, name)(filled, dim=dim)
    found = getattr(functional, name)(ours, mask if masked else None, dim=dim, **options)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)
    found.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=1, max_size=20), st.sampled_from([1.1, 1.5, 1.8, 2.0]))
def test_newton_agrees_with_bisection_of_the_package(row: list[float], alpha: float) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    expected = package.entmax_bisect(logits, alpha=alpha, n_iter=80)
    torch.testing.assert_close(newton.solve(logits, alpha), expected, atol=1e-8, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("_eager_again")
@pytest.mark.parametrize("alpha", [2.0, 1.5])
def test_compiled_equals_eager_and_lengths_share_a_kernel(alpha: float) -> None:
    newton._fused_solve.cache_clear()
    newton._fused_pull_back.cache_clear()
    torch._dynamo.utils.counters.clear()
    for n_rows, length in ((5, 17), (64, 100), (33, 260), (7, 999)):
        logits, grad = rows(n_rows, length, scale=0.3, dtype=torch.float32), rows(n_rows, length, dtype=torch.float32)
        newton.set_compile("off")
        weights, pulled = newton.solve(logits, alpha), newton.pull_back(newton.solve(logits, alpha), grad, alpha)
        newton.set_compile("on")
        torch.testing.assert_close(newton.solve(logits, alpha), weights, atol=2e-7, rtol=0)
        torch.testing.assert_close(newton.pull_back(weights, grad, alpha), pulled, atol=1e-6, rtol=0)
    # One forward, at most one to go on with, one backward.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.slow
@pytest.mark.usefixtures("_eager_again")
def test_compiled_goes_on_where_its_passes_do_not_suffice() -> None:
    """Many keys, spread evenly over [0, 1], take more passes than the kernel has."""
    hard = torch.rand(2, 100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    newton.set_compile("on")
    weights = newton.solve(hard, 2.0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-12, rtol=0)
    newton.set_compile("off")
    torch.testing.assert_close(weights, newton.solve(hard, 2.0), atol=1e-12, rtol=0)


@pytest.mark.usefixtures("_eager_again")
def test_auto_falls_back_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_compiler(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no C++ compiler\nhere")

    monkeypatch.setattr(newton, "_fused_solve", no_compiler)
    logits = rows(64, 1024)
    with caplog.at_level(logging.INFO):
        newton.set_compile("auto")
        first, second = newton.solve(logits, 2.0), newton.solve(logits, 2.0)
    assert torch.equal(first, second)
    assert [record.getMessage() for record in caplog.records] == [
        "sparse normalizers are compiled; the first steps take some seconds longer (compile=off: eager)",
        "torch.compile failed (no C++ compiler): sparse normalizers run eagerly",
    ]
    newton.set_compile("on")
    with pytest.raises(RuntimeError, match="no C"):
        newton.solve(logits, 2.0)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="compile=maybe: must be one of auto, on, off"):
        newton.set_compile("maybe")
