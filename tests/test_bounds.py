"""Every provable bound on random and extreme inputs, and a counterexample to each published one that is false."""

from __future__ import annotations

import math

import naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnlimits import bounds

seeds = st.integers(0, 2**31 - 1)
temperatures = st.sampled_from([0.02, 0.3, 1.0, 5.0])
SLACK = 1e-9


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def real(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def sphere(seed: int, *shape: int) -> Tensor:
    return torch.nn.functional.normalize(numbers(seed, *shape), dim=-1)


def within(value: Tensor, interval: bounds.Interval) -> bool:
    above = interval.lower is None or bool((value >= interval.lower * (1 - SLACK) - SLACK).all())
    return above and (interval.upper is None or bool((value <= interval.upper * (1 + SLACK) + SLACK).all()))


# ------------------------------------------------------------------------------------------------------- weights


@given(seeds, st.integers(1, 40))
def test_pointwise_weights_lie_between_both_bounds(seed: int, n: int) -> None:
    f = numbers(seed, n).abs() + 0.1
    pair = bounds.pointwise_weights(real(n), f.min(), f.max())
    assert within(f / f.sum(), pair.provable)
    assert within(f / f.sum(), pair.published)
    assert pair.provable.upper <= pair.published.upper + SLACK


def test_provable_weights_are_attained() -> None:
    f = torch.tensor([5.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    pair = bounds.pointwise_weights(real(4), f.min(), f.max())
    assert pair.provable.upper.item() == pytest.approx((f / f.sum())[0].item())
    assert pair.provable.lower.item() == pytest.approx(1 / (1 + 5 * 3))


@given(seeds, st.integers(1, 40), temperatures)
def test_softmax_weights_lie_between_both_bounds(seed: int, n: int, T: float) -> None:
    q, k = numbers(seed, 4), numbers(seed + 1, n, 4)
    logit_bound = q.norm() * k.norm(dim=-1).max()
    pair = bounds.softmax_weights(real(n), logit_bound, T)
    weights = torch.softmax(k @ q / T, dim=-1)
    assert within(weights, pair.provable)
    assert within(weights, pair.published)


def test_with_its_own_keys_norm_corollary_1_is_false() -> None:
    """A key of norm 0 beside a long one would have weight exactly 1/n."""
    keys, q = torch.tensor([0.0, 3.0], dtype=torch.float64), 1.0
    weights = torch.softmax(keys * q, dim=-1)
    own = bounds.softmax_weights(real(2), (q * keys[0]).abs(), 1.0)
    assert weights[0] < own.published.lower
    largest = bounds.softmax_weights(real(2), (q * keys).abs().max(), 1.0)
    assert within(weights, largest.provable)


# ------------------------------------------------------------------------------------------------------ Theorem 1


def fixed(a: Tensor, x: Tensor, chosen: list[int]) -> tuple[float, bounds.Pair]:
    """d~ of a chosen set, and the bounds on it."""
    n, outside = len(a), [i for i in range(len(a)) if i not in chosen]
    s = sum((a[i] * x[i] for i in chosen), torch.zeros(x.shape[1], dtype=torch.float64))
    pair = bounds.selected_distance(
        real(n),
        len(chosen),
        selected_mass=a[chosen].sum(),
        selected_norm=s.norm(),
        widest_pair=torch.cdist(x[outside], x[chosen]).max(),
        longest_inside=x[chosen].norm(dim=-1).max(),
        longest_outside=x[outside].norm(dim=-1).max(),
        outside_mass=a[outside].abs().sum(),
    )
    return naive.distance(a.tolist(), x, range(n), chosen), pair


@given(seeds, st.integers(2, 12), st.integers(1, 11), st.sampled_from([0.1, 1.0, 30.0]))
def test_distance_of_the_top_set_lies_between_its_bounds(seed: int, n: int, size: int, sharp: float) -> None:
    a = torch.softmax(numbers(seed, n, scale=sharp), dim=-1)
    d, pair = fixed(a, numbers(seed + 1, n, 3), naive.selected(a.tolist(), range(n), min(size, n - 1)))
    assert within(real(d), pair.provable)
    assert within(real(d), pair.published)


@given(seeds, st.integers(2, 12), st.integers(1, 11))
def test_provable_distance_holds_for_any_set_and_weights_of_any_sign(seed: int, n: int, size: int) -> None:
    d, pair = fixed(numbers(seed, n), numbers(seed + 1, n, 3), list(range(min(size, n - 1))))
    assert within(real(d), pair.provable)


def test_published_distance_is_false_of_sets_that_are_not_the_top() -> None:
    """The small weight is selected, all of the large one lies outside, and d1 and the inner norm are small."""
    a, x = torch.tensor([0.1, 0.9], dtype=torch.float64), torch.tensor([[1.0], [1.1]], dtype=torch.float64)
    d, pair = fixed(a, x, [0])
    assert d > pair.published.upper
    assert within(real(d), pair.provable)


def expected(a: Tensor, x: Tensor, size: int) -> bounds.Pair:
    """The bounds on E d~, their terms one by one from theory."""
    n, y = len(a), a[:, None] * x
    total, c = y.sum(0), size / (n - 1)
    means = [((1 + c) * y[i] - c * total).norm() for i in range(n)]
    spreads = []
    for i in range(n):
        others = sum(y[j].square().sum() for j in range(n) if j != i)
        factor = size * (n - 1 - size) / ((n - 1) * (n - 2)) if n > 2 else math.nan
        variance = factor * (others - (total - y[i]).square().sum() / (n - 1))
        spreads.append((means[i] ** 2 + variance).clamp(min=0).sqrt() if n > 2 else real(math.nan))
    return bounds.expected_distance(
        real(n),
        size,
        mean_norms=torch.stack(means).sum(),
        spread_norms=torch.stack(spreads).sum(),
        total_norm=y.norm(dim=-1).sum(),
    )


@settings(deadline=None)
@given(seeds, st.integers(2, 8), st.integers(1, 7), st.sampled_from([0.1, 1.0, 30.0]))
def test_expectation_by_enumeration_lies_between_its_bounds(seed: int, n: int, size: int, sharp: float) -> None:
    a, x, size = torch.softmax(numbers(seed, n, scale=sharp), dim=-1), numbers(seed + 1, n, 3), min(size, n - 1)
    exact = naive.expected_distance(a.tolist(), x, range(n), size)
    assert within(real(exact), expected(a, x, size).provable)


def test_expectation_by_monte_carlo_lies_between_its_bounds() -> None:
    """And away from both ends: the published sum is not the expectation."""
    n, size, draws = 60, 8, 4000
    a, x = torch.softmax(numbers(0, n, scale=2.0), dim=-1), numbers(1, n, 4)
    y, generator = a[:, None] * x, torch.Generator().manual_seed(2)
    found = []
    for _ in range(draws):
        order = torch.randperm(n, generator=generator)
        found.append((y[order[size:]] - y[order[:size]].sum(0)).norm(dim=-1).sum())
    samples = torch.stack(found)
    error = samples.std() / math.sqrt(draws)
    pair = expected(a, x, size)
    assert pair.provable.lower + 5 * error < samples.mean() < pair.provable.upper - 5 * error
    assert samples.mean() > pair.published.upper + 5 * error


def test_limit_of_corollary_2_is_false() -> None:
    """Equal weights and one vector for all: d~ = (n - N)(N - 1)/n ||x|| whatever set is drawn; sum ||y|| is ||x||."""
    n, size = 400, 5
    a, x = torch.full((n,), 1 / n, dtype=torch.float64), torch.ones(n, 1, dtype=torch.float64)
    pair = bounds.limit_distance(expected(a, x, size).provable, (a[:, None] * x).norm(dim=-1).sum())
    exact = real((n - size) * (size - 1) / n)
    assert within(exact, pair.provable)
    assert pair.published.upper < exact / 3


# ------------------------------------------------------------------------------------------------------ Theorem 2


@given(seeds, st.integers(1, 10), st.integers(1, 6), st.sampled_from([0.1, 1.0, 30.0]))
def test_xi_is_never_below_the_distance_it_bounds(seed: int, size: int, dimension: int, sharp: float) -> None:
    a, x = torch.softmax(numbers(seed, size + 1, scale=sharp), dim=-1)[:size], sphere(seed + 1, size, dimension)
    x[0] = x[-1]  # two keys alike, delta = 0
    delta = torch.pdist(x).min() if size > 1 else real(math.inf)
    distances = ((a[:, None] * x).sum(0) - a[:, None] * x).norm(dim=-1)
    assert within(distances, bounds.Interval(upper=bounds.xi(a, delta if size > 1 else real(0.0))))


@given(seeds, st.integers(2, 12), st.integers(1, 6), st.sampled_from([0.1, 1.0, 30.0]))
def test_no_fewer_are_inside_than_surely(seed: int, n: int, size: int, sharp: float) -> None:
    size = min(size, n - 1)
    a, x = torch.softmax(numbers(seed, n, scale=sharp), dim=-1), sphere(seed + 1, n, 4)
    chosen = naive.selected(a.tolist(), range(n), size)
    s = (a[chosen, None] * x[chosen]).sum(0)
    r = min((s - a[j] * x[j]).norm() for j in range(n) if j not in chosen)
    sure = bounds.surely_inside(a[chosen], r, torch.pdist(x).min())
    assert sure.item() <= naive.separability(a.tolist(), x, range(n), size) + SLACK


def share_inside(a: Tensor, r: Tensor, dimension: int, draws: int = 4000) -> Tensor:
    """E N_s/N over vectors drawn from the sphere, r fixed."""
    y = a[:, None] * sphere(3, draws, len(a), dimension)
    return ((y.sum(1, keepdim=True) - y).norm(dim=-1) < r).double().mean()


@pytest.mark.parametrize("dimension", [2, 16, 64])
@pytest.mark.parametrize("sharp", [0.0, 2.0])
@pytest.mark.parametrize("times_sigma", [0.3, 0.8, 1.0, 1.2, 3.0])
def test_share_inside_lies_between_the_provable_bounds(dimension: int, sharp: float, times_sigma: float) -> None:
    a = torch.softmax(numbers(5, 32, scale=sharp), dim=-1)
    r = times_sigma * a.square().sum().sqrt()
    pair = bounds.separable_share(a, r, real(0.0), dimension)
    assert pair.provable.lower - 0.02 <= share_inside(a, r, dimension) <= pair.provable.upper + 0.02


def test_published_upper_bound_of_theorem_2_is_false() -> None:
    """Equal weights 1/32, d = 64, r = 1.2 sigma: 0.988 are inside; the bound is 0.75 (0.93 for a drawn delta)."""
    a = torch.full((32,), 1 / 32, dtype=torch.float64)
    r = 1.2 * math.sqrt(31) / 32
    pair = bounds.separable_share(a, real(r), real(0.0), 64)
    inside = share_inside(a, real(r), 64)
    assert inside.item() == pytest.approx(0.988, abs=0.01)
    assert pair.published.upper.item() == pytest.approx(0.75, abs=0.01)
    closest = torch.pdist(sphere(3, 32, 64)).min()
    assert bounds.separable_share(a, real(r), closest, 64).published.upper < inside - 0.02
    assert pair.provable.lower <= inside + 0.01


# ----------------------------------------------------------------------------------------------------- gradients


def softmax_jacobian(z: Tensor, T: float) -> Tensor:
    return torch.autograd.functional.jacobian(lambda logits: torch.softmax(logits / T, dim=-1), z)


@given(seeds, st.integers(2, 20), temperatures, st.sampled_from([0.01, 1.0, 10.0]))
def test_softmax_jacobian_is_within_the_provable_bounds(seed: int, n: int, T: float, sharp: float) -> None:
    z = numbers(seed, n, scale=sharp)
    norm = torch.linalg.matrix_norm(softmax_jacobian(z, T), 2)
    assert within(norm, bounds.softmax_jacobian(T).provable)
    assert norm <= bounds.jacobian_by_weights(torch.softmax(z / T, dim=-1).max(), T) * (1 + SLACK)


@pytest.mark.parametrize("T", [0.05, 1.0, 4.0])
def test_two_tied_logits_refute_the_published_jacobian_bound(T: float) -> None:
    norm = torch.linalg.matrix_norm(softmax_jacobian(torch.zeros(2, dtype=torch.float64), T), 2)
    pair = bounds.softmax_jacobian(T)
    assert norm.item() == pytest.approx(1 / (2 * T)) == pair.provable.upper.item()
    assert norm > pair.published.upper


@given(seeds, st.integers(2, 12))
def test_pointwise_jacobian_is_within_the_provable_bound(seed: int, n: int) -> None:
    """F = log(1 + e^z), whose log-derivative is below 1."""
    z = numbers(seed, n, scale=3.0)

    def normalized(logits: Tensor) -> Tensor:
        f = torch.nn.functional.softplus(logits)
        return f / f.sum()

    norm = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(normalized, z), 2)
    psi = torch.sigmoid(z) / torch.nn.functional.softplus(z)
    assert within(norm, bounds.pointwise_jacobian(psi.max()).provable)


@given(seeds, st.integers(2, 20), temperatures, st.sampled_from([1e-3, 0.1, 10.0]))
def test_finite_differences_are_within_the_provable_bound(seed: int, n: int, T: float, step: float) -> None:
    z, v = numbers(seed, n), sphere(seed + 1, n)
    g = (torch.softmax((z + step * v) / T, -1) - torch.softmax(z / T, -1)).norm() / step
    assert g <= bounds.softmax_sensitivity(T, step).provable.upper * (1 + 1e-7)
