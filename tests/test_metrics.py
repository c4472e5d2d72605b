"""Every metric against tests/naive.py, for every normalizer, and against values derived by hand."""

from __future__ import annotations

import math

import naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnlimits.capacity import Settings, measure_layer, spectral_norm
from attnlimits.metrics.distance import distance, expectations, pairwise, terms, widest_pairs
from attnlimits.metrics.separability import anisotropy, separability, unit
from attnlimits.metrics.topn import rank_keys, top_n
from attnlimits.metrics.vanishing import log_slope, vanishing
from attnlimits.metrics.verdict import VERDICTS, Thresholds, verdict
from attnlimits.normalizers import REGISTRY, make_normalizer
from attnlimits.probe import LayerView

every_normalizer = pytest.mark.parametrize("name", sorted(REGISTRY))
LENGTH = 9


def make(name: str, T: float = 1.0, **options: object) -> torch.nn.Module:
    return make_normalizer({"name": name, **options}, T=T, n_heads=2, context_length=16).double().requires_grad_(False)


def masks() -> dict[str, Tensor]:
    """(Q, K): causal, and causal with two keys of padding on the left."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return {"causal": causal, "padded": causal & (torch.arange(LENGTH) >= 2)}


def inputs(kind: str) -> tuple[Tensor, Tensor]:
    """Logits (1, H, Q, K) and representations (1, H, K, D)."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(1, 2, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 2, LENGTH, 3, generator=generator, dtype=torch.float64)
    if kind == "equal logits":
        logits = torch.zeros_like(logits)
    elif kind == "one-hot":
        logits = logits * 100
    elif kind == "repeated and zero vectors":
        x[..., 1, :], x[..., 4, :] = x[..., 0, :], 0.0
    return logits, x


def each_row(weights: Tensor, x: Tensor, mask: Tensor) -> list[tuple[tuple[int, int], list[float], Tensor, list[int]]]:
    heads, rows = range(weights.shape[1]), range(weights.shape[2])
    visible = [[k for k in range(mask.shape[1]) if mask[q, k]] for q in rows]
    return [((h, q), weights[0, h, q].tolist(), x[0, h], visible[q]) for h in heads for q in rows]


@every_normalizer
@pytest.mark.parametrize("padding", ["causal", "padded"])
@pytest.mark.parametrize("kind", ["random", "equal logits", "one-hot", "repeated and zero vectors"])
def test_row_metrics_are_their_definitions(name: str, padding: str, kind: str) -> None:
    (logits, x), mask, size = inputs(kind), masks()[padding], 2
    weights = make(name)(logits, mask)
    of, ranked = terms(weights, x, mask), rank_keys(weights, mask)
    top = top_n(ranked, of.visible, size)
    by_name = distance(of, top, widest=widest_pairs(pairwise(x), ranked, [top])[0])
    ratio = separability(terms(weights, unit(x), mask), top)["separability"]
    spread, shares = anisotropy(x, mask), vanishing(weights, mask)
    for at, a, vectors, visible in each_row(weights, x, mask):
        here = (0, *at)
        if sum(map(abs, a)) > 0 and len(visible) > 1:
            assert shares["entropy"][here].item() == pytest.approx(naive.entropy(a, visible), abs=1e-9)
        if len(visible) > 1 and kind != "repeated and zero vectors":  # cosine_similarity has an epsilon
            assert spread["anisotropy"][here].item() == pytest.approx(naive.anisotropy(vectors, visible), abs=1e-9)
        if len(visible) <= size:
            assert math.isnan(ratio[here])
            assert math.isnan(by_name["distance"][here])
            continue
        chosen = naive.selected(a, visible, size)
        exact = naive.distance(a, vectors, visible, chosen)
        assert by_name["distance"][here].item() == pytest.approx(exact, rel=1e-6, abs=1e-7)
        assert by_name["distance_lower"][here] <= exact + 1e-7
        assert by_name["distance_upper"][here] >= exact - 1e-7
        published = naive.published_bound(a, vectors, visible, chosen)
        assert by_name["distance_published"][here].item() == pytest.approx(published, rel=1e-6, abs=1e-7)
        if kind == "random":  # elsewhere ties are decided by rounding
            assert ratio[here].item() == naive.separability(a, vectors, visible, size)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 7), st.integers(1, 4))
def test_expected_distance_lies_within_its_bounds(seed: int, n: int, size: int) -> None:
    """Against enumeration of all subsets; N = 1 makes nothing of the variance, and N close to n little is left."""
    size = min(size, n - 1)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(1, 1, 1, n, generator=generator, dtype=torch.float64).softmax(-1)
    x = torch.randn(1, 1, n, 3, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, n, dtype=torch.bool)
    of = terms(weights, x, mask)
    values = expectations(of, top_n(rank_keys(weights, mask), of.visible, size))
    exact = naive.expected_distance(weights[0, 0, 0].tolist(), x[0, 0], range(n), size)
    assert values["expected_distance_lower"].item() <= exact * (1 + 1e-9)
    assert values["expected_distance_upper"].item() >= exact * (1 - 1e-9)
    if size == n - 1:  # one key is left out, and which one is all there is to choose
        assert values["expected_distance_lower"].item() == pytest.approx(exact)


@every_normalizer
@pytest.mark.parametrize("T", [0.3, 1.0])
@pytest.mark.parametrize("kind", ["random", "equal logits", "one-hot"])
def test_jacobian_norm_is_autograds(name: str, T: float, kind: str) -> None:
    normalizer, mask = make(name, T), masks()["padded"]
    logits = inputs(kind)[0]
    if kind == "equal logits":
        logits = logits + 0.5  # off the kinks at 0
    found = spectral_norm(normalizer, logits, normalizer(logits, mask), mask)
    for row in range(LENGTH):
        for head in range(2):

            def one_row(z: Tensor, head: int = head, row: int = row) -> Tensor:
                whole = logits.clone()
                whole[0, head, row] = z
                return normalizer(whole, mask)[0, head, row]

            jacobian = torch.autograd.functional.jacobian(one_row, logits[0, head, row])
            exact = torch.linalg.matrix_norm(jacobian, 2).item()
            assert found[0, head, row].item() == pytest.approx(exact, rel=2e-4, abs=1e-9), (head, row)


def view(name: str, logits: Tensor, x: Tensor, T: float = 1.0) -> LayerView:
    normalizer, mask = make(name, T), torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    return LayerView(0, normalizer, logits, mask, normalizer(logits, mask), x)


def test_constant_logits_vanish_as_one_over_n() -> None:
    """Entropy ln n, slope -1; with equal vectors nothing inside is nearer than the outside, so N_s = 0."""
    logits = torch.zeros(1, 2, 64, 64, dtype=torch.float64)
    x = torch.ones(1, 2, 64, 4, dtype=torch.float64)
    heads = measure_layer(view("softmax", logits, x), Settings(top_n=(4,)))
    torch.testing.assert_close(heads["entropy"], torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(heads["max_weight_slope"], -torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(heads["max_weight_times_n"], torch.ones(2, dtype=torch.float64))
    assert heads["separability_n4"].tolist() == [0.0, 0.0]
    assert [VERDICTS[int(v)] for v in heads["verdict"]] == ["vanishing"] * 2


def test_orthogonal_values_of_equal_weight_are_all_separated() -> None:
    """x_i = e_i, a = 1/n, N: inside ||a x_i - s||^2 = (N - 1)/n^2, outside (N + 1)/n^2."""
    logits, x = torch.zeros(1, 2, 8, 8, dtype=torch.float64), torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8)
    heads = measure_layer(view("softmax", logits, x), Settings(top_n=(3,)))
    assert heads["separability_n3"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("T", [0.1, 1.0])
def test_sparsemax_has_zeros_and_norm_one_over_T(T: float) -> None:
    logits = torch.randn(1, 2, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * T
    shown = view("sparsemax", logits, torch.randn(1, 2, 32, 4, dtype=torch.float64), T)
    norms = spectral_norm(shown.normalizer, logits, shown.weights_BxHxRxK, shown.mask.expand_as(logits))
    several = (shown.weights_BxHxRxK > 0).sum(-1) >= 2
    torch.testing.assert_close(norms, several.double() / T)
    assert measure_layer(shown, Settings())["zeros"].min() > 0.3


def test_softmax_attains_the_provable_bound_and_breaks_the_published_one() -> None:
    tie = torch.tensor([0.0, 0.0], dtype=torch.float64).expand(1, 2, 1, 2)
    normalizer = make("softmax", 0.2)
    norm = spectral_norm(normalizer, tie, normalizer(tie), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(norm, torch.full((1, 2, 1), 1 / (2 * 0.2), dtype=torch.float64))


def test_slope_and_its_error_are_those_of_least_squares() -> None:
    n = torch.tensor([1, 2, 4, 8, 16])
    exact, error = log_slope(2.0 / n.double() ** 0.5, n)
    assert exact.item() == pytest.approx(-0.5)
    assert error.item() == pytest.approx(0.0, abs=1e-7)
    noisy = torch.tensor([9.0, 0.5, 0.2, 0.2, 0.05])
    slope, error = log_slope(noisy, n)
    x, y = n[1:].double().log(), noisy[1:].double().log()
    design = torch.stack([torch.ones(4, dtype=torch.float64), x], 1)
    coefficients = torch.linalg.lstsq(design, y).solution
    variance = (y - design @ coefficients).square().sum() / 2 * torch.linalg.inv(design.T @ design)[1, 1]
    assert slope.item() == pytest.approx(coefficients[1].item())
    assert error.item() == pytest.approx(variance.sqrt().item())
    assert math.isnan(log_slope(noisy[:3], n[:3])[0])


def test_rows_without_weight_are_undefined_and_left_out() -> None:
    values = vanishing(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    assert math.isnan(values["entropy"])
    assert math.isnan(values["effective_keys"])
    assert values["zeros"].item() == 1.0
    assert values["row_sum"].item() == 0.0


def test_verdicts() -> None:
    at = Thresholds()
    cases = {"healthy": (-0.3, 0.5, 0.9, 0.2), "saturated": (-0.3, 0.5, 0.7, 0.2), "vanishing": (-1.0, 0.5, 0.9, 0.2)}
    cases |= {"sharp": (-1.0, 0.5, 0.7, 3.0)}
    for word, numbers in cases.items():
        assert VERDICTS[int(verdict(*(torch.tensor([v]) for v in numbers), at))] == word
    unknown = torch.full((1,), math.nan)
    assert VERDICTS[int(verdict(unknown, unknown, unknown, unknown, at))] == "healthy"
