"""Every normalizer of the registry against its declarations, and each against its definition in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import PROJECT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnlimits.normalizers import REGISTRY, make_normalizer
from attnlimits.normalizers.__main__ import markdown

NAMES = sorted(REGISTRY)
every_normalizer = pytest.mark.parametrize("name", NAMES)
temperatures = pytest.mark.parametrize("T", [1e-3, 0.05, 1.0, 1e3])


def make(name: str, T: float = 1.0, **options: object) -> torch.nn.Module:
    return make_normalizer({"name": name, **options}, T=T, n_heads=2, context_length=16).double()


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@every_normalizer
@temperatures
def test_rows_keep_what_the_normalizer_declares(name: str, T: float) -> None:
    logits, mask = random_logits(3, 2, 9, 9), causal(9)
    weights = make(name, T)(logits, mask)
    assert (weights >= 0).all()
    assert torch.equal(weights.masked_select(~mask), torch.zeros_like(weights.masked_select(~mask)))
    if REGISTRY[name].properties.row_sum == "one":
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 9, dtype=torch.float64))
    if REGISTRY[name].properties.shift_invariant:
        torch.testing.assert_close(make(name, T)(logits + 1.5, mask), weights)


@every_normalizer
def test_masked_row_equals_the_row_of_its_visible_keys(name: str) -> None:
    logits = random_logits(1, 2, 1, 7)
    mask = torch.tensor([True, False, True, True, False, True, False])
    normalizer = make(name, T=0.3)
    torch.testing.assert_close(normalizer(logits, mask)[..., mask], normalizer(logits[..., mask], None))


@every_normalizer
def test_fully_masked_row_gives_zero_and_gradient_zero(name: str) -> None:
    logits = random_logits(1, 2, 2, 4).requires_grad_()
    mask = torch.tensor([[True, True, False, False], [False, False, False, False]])
    weights = make(name)(logits, mask)
    assert torch.equal(weights[..., 1, :], torch.zeros_like(weights[..., 1, :]))
    (weights * torch.arange(4.0)).sum().backward()
    assert torch.equal(logits.grad[..., 1, :], torch.zeros_like(logits.grad[..., 1, :]))
    assert torch.isfinite(logits.grad).all()


@every_normalizer
@pytest.mark.parametrize("mask", [None, causal(5)], ids=["full", "causal"])
def test_gradients_are_those_of_finite_differences(name: str, mask: Tensor | None) -> None:
    normalizer = make(name, T=0.7)
    for parameter in normalizer.parameters():
        parameter.data += 0.03  # off the kink at which it may start
    logits = random_logits(1, 2, 5, 5, scale=0.7).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, *_: normalizer(z, mask), (logits, *normalizer.parameters()))


@every_normalizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outlier", [0.0, 40.0, -1e4])
def test_half_precision_rows_still_sum_to_one(name: str, dtype: torch.dtype, outlier: float) -> None:
    n_keys = 16_384
    logits = torch.full((1, 2, 1, n_keys), -20.0, dtype=dtype)
    logits[..., 0] = outlier
    weights = make_normalizer({"name": name}, T=1.0, n_heads=2, context_length=n_keys)(logits)
    assert weights.dtype == dtype
    assert torch.isfinite(weights).all()
    if REGISTRY[name].properties.row_sum == "one":
        assert (weights.double().sum(-1) - 1).abs().max() < 1e-3


def naive_sparsemax(row: list[float]) -> list[float]:
    """The definition, by enumeration: the one support whose threshold keeps exactly its own keys."""
    for size in range(1, len(row) + 1):
        for support in itertools.combinations(range(len(row)), size):
            tau = (math.fsum(row[i] for i in support) - 1) / size
            inside = all(row[i] > tau for i in support)
            if inside and all(row[i] <= tau for i in range(len(row)) if i not in support):
                return [max(z - tau, 0.0) for z in row]
    raise AssertionError("no support")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_sparsemax_is_the_projection_on_the_simplex(row: list[float]) -> None:
    weights = make("sparsemax")(torch.tensor(row, dtype=torch.float64).expand(2, 1, -1))
    assert weights[0, 0].tolist() == pytest.approx(naive_sparsemax(row), abs=1e-9)


@pytest.mark.parametrize("family", ["normal", "tiny normal", "constant", "linear", "two clusters"])
def test_sparsemax_of_long_rows_agrees_with_sorting(family: str) -> None:
    n = 1024
    rows = {
        "normal": random_logits(4, n, scale=1.0),
        "tiny normal": random_logits(4, n, scale=0.1),
        "constant": torch.zeros(4, n, dtype=torch.float64),
        "linear": torch.linspace(-1, 1, n, dtype=torch.float64).expand(4, n),
        "two clusters": random_logits(4, n, scale=1e-3) + (torch.arange(n) % 2),
    }[family]
    torch.testing.assert_close(make("sparsemax")(rows[None]), sorted_sparsemax(rows)[None], atol=1e-12, rtol=0)
    single = make("sparsemax").float()(rows[None].float())
    torch.testing.assert_close(single.double(), sorted_sparsemax(rows)[None], atol=1e-6, rtol=0)


def sorted_sparsemax(rows: Tensor) -> Tensor:
    """Martins & Astudillo 2016, algorithm 1."""
    descending = rows.sort(-1, descending=True).values
    sums = descending.cumsum(-1)
    ranks = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype)
    size = (1 + ranks * descending > sums).sum(-1, keepdim=True)
    tau = (sums.gather(-1, size - 1) - 1) / size
    return (rows - tau).clamp(min=0)


# Name, options, one row (None = masked key), and the weights that were derived independently of any implementation.
SMALL_ROWS = [
    ("sparsemax", {}, [1, 0.5, None], [0.75, 0.25, 0]),
    ("ssmax", {"s": 0.43}, [1, 0, None, None], [0.573967, 0.426033, 0, 0]),
    ("softpick", {}, [1, None], [1, 0]),
    ("sa_softmax", {}, [1, 0, None], [0.731059, 0, 0]),
    ("sa_softmax", {}, [0, 0, 0], [1 / 3] * 3),
    ("sa_softmax", {}, [-1, -1, -1], [0, 0, 0]),
    ("sa_softmax", {}, [-2], [0]),
    ("sigmoid", {}, [0, 0, 0, None], [0.25, 0.25, 0.25, 0]),
    ("relu", {}, [3, -1, 0, None], [1, 0, 0, 0]),
    ("softmax1", {}, [0, 0, None], [1 / 3, 1 / 3, 0]),
    ("softmax1", {}, [-100, -101], [3.720076e-44, 1.368539e-44]),
    ("sink", {"sigma": 0.0}, [0, 0, None], [1 / 3, 1 / 3, 0]),
    ("top_k", {"k": 2}, [3, 1, 2, None], [0.731059, 0, 0.268941, 0]),
    ("top_k", {"k": 3}, [2, 2, None, None], [0.5, 0.5, 0, 0]),
    ("elastic", {"tau": -1.0}, [0, 0, None], [0, 0, 0]),
    ("elastic", {}, [0, 0, None], [0.5, 0.5, 0]),
    ("ssa", {"b": 1.0, "m": 2.0}, [1, -1, None], [16 / 17, 1 / 17, 0]),
    ("log_length", {"variant": "critical", "gamma": 1.0}, [1, 0, None], [2 / 3, 1 / 3, 0]),
    ("log_length", {"n_train": 2}, [1, 0, None], [0.731059, 0.268941, 0]),
    ("log_length", {"variant": "yarn", "n_train": 3}, [1, 0, None], [0.731059, 0.268941, 0]),
]


@pytest.mark.parametrize(("name", "options", "row", "expected"), SMALL_ROWS)
def test_small_row(name: str, options: dict, row: list, expected: list) -> None:
    mask = torch.tensor([z is not None for z in row])
    for hidden in (0.0, -1e30, 50.0):  # what lies at a masked key is of no importance
        logits = torch.tensor([hidden if z is None else z for z in row], dtype=torch.float64)
        weights = make(name, **options)(logits.expand(2, 1, -1), mask)
        assert weights[0, 0].tolist() == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_top_k_keeps_exactly_k_on_ties() -> None:
    weights = make("top_k", k=3)(torch.zeros(1, 2, 1, 10, dtype=torch.float64))
    assert (weights > 0).sum(-1).unique().tolist() == [3]


def test_adaptive_temperature_is_softmax_outside_its_range_and_sharper_inside() -> None:
    """Between about 0.85 and 5.94 nats; rows of 2 and of 1000 equal keys but one lie outside, of 20 inside."""
    for n, sharper in ((2, False), (20, True), (1000, False)):
        row = torch.zeros(1, 2, 1, n, dtype=torch.float64)
        row[..., 0] = 0.5
        plain, ours = make("softmax")(row)[..., 0].max(), make("adaptive_temperature")(row)[..., 0].max()
        assert (ours > plain + 1e-6) == sharper


def test_ssmax_starts_with_an_average_factor_of_one() -> None:
    normalizer = make_normalizer({"name": "ssmax"}, T=1.0, n_heads=3, context_length=1024)
    factors = normalizer.row_scale(torch.arange(1, 1025)[None])
    torch.testing.assert_close(factors.mean(-1), torch.ones(3), atol=1e-5, rtol=0)


@every_normalizer
@pytest.mark.parametrize("T", [0.0, -1.0, math.inf, math.nan])
def test_temperature_must_be_positive_and_finite(name: str, T: float) -> None:
    with pytest.raises(ValueError, match="T="):
        make(name, T)


@every_normalizer
def test_declared_row_sum_and_zeros(name: str) -> None:
    weights, mask = make(name)(random_logits(4, 2, 9, 9, scale=4.0), causal(9)), causal(9)
    if REGISTRY[name].properties.row_sum == "at most one":
        assert (weights.sum(-1) <= 1 + 1e-12).all()
    has_zeros = (weights.masked_select(mask) == 0).any().item()
    if not REGISTRY[name].properties.sparse and name != "sa_softmax":  # which zeroes its row's minimum alone
        assert not has_zeros
    if REGISTRY[name].properties.sparse:
        if options := {"top_k": {"k": 2}, "elastic": {"tau": -1.0}}.get(name):
            weights = make(name, **options)(random_logits(4, 2, 9, 9), mask)
        assert (weights.masked_select(mask) == 0).any()


@every_normalizer
def test_declared_start_near_softmax(name: str) -> None:
    logits, mask = random_logits(4, 2, 256, 256, scale=1.0), causal(256)
    ours, softmax = (
        make_normalizer({"name": each}, T=1.0, n_heads=2, context_length=256)(logits, mask)
        for each in (name, "softmax")
    )
    moved = (ours - softmax).abs().sum(-1).mean() / 2
    assert (moved < 0.1) == REGISTRY[name].properties.near_softmax


CONSTANT_BOUNDS = {"1/2": 0.5, "1": 1.0, "1/4": 0.25, "1/n": 1 / 7}
BOUNDED = [name for name in NAMES if REGISTRY[name].properties.jacobian_bound in CONSTANT_BOUNDS]


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("T", [0.1, 1.0])
def test_declared_jacobian_bound_holds_and_is_approached(name: str, T: float) -> None:
    normalizer = make(name, T)
    bound = CONSTANT_BOUNDS[REGISTRY[name].properties.jacobian_bound] / T
    rows = [random_logits(1, 7, seed=seed, scale=s * T) for seed in range(30) for s in (0.1, 1.0, 4.0)]
    tie = torch.tensor([[0.0, 0, -9, -9, -9, -9, -9]], dtype=torch.float64) * T
    norms = []
    for row in [*rows, tie]:
        two_heads = row.expand(2, 1, 7)
        jacobian = torch.autograd.functional.jacobian(lambda z: normalizer(z)[0, 0], two_heads)[:, 0, 0]
        norms.append(torch.linalg.matrix_norm(jacobian, 2).item())
    assert max(norms) <= bound * (1 + 1e-9)
    assert max(norms) > 0.5 * bound


def test_docs_are_what_the_registry_says() -> None:
    assert (PROJECT / "docs" / "normalizers.md").read_text(encoding="utf-8") == markdown()


@every_normalizer
def test_compile_vmap_and_jacrev(name: str) -> None:
    """fullgraph: nothing falls back to the interpreter; aot_eager: no compiler is needed to see it."""
    torch.compiler.reset()  # the classes share a forward, and it counts recompilations
    normalizer, logits, mask = make(name, T=0.7), random_logits(3, 2, 5, 5, scale=0.7), causal(5)
    expected = normalizer(logits, mask)
    compiled = torch.compile(normalizer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, mask), expected)
    torch.testing.assert_close(torch.vmap(normalizer, in_dims=(0, None))(logits, mask), expected)
    first = logits[0]
    expected_jacobian = torch.autograd.functional.jacobian(lambda z: normalizer(z, mask), first)
    torch.testing.assert_close(torch.func.jacrev(lambda z: normalizer(z, mask))(first), expected_jacobian)


@every_normalizer
def test_second_derivatives_are_finite(name: str) -> None:
    logits = random_logits(1, 2, 5, 5).requires_grad_()
    weights = make(name)(logits, causal(5))
    (first,) = torch.autograd.grad((weights * random_logits(5, seed=1)).sum(), logits, create_graph=True)
    if first.requires_grad:  # piecewise linear maps have none
        (second,) = torch.autograd.grad(first.square().sum(), logits, allow_unused=True)
        assert second is None or torch.isfinite(second).all()


EXTREME_ROWS = {
    "huge": [1e4, -1e4, 0.0],
    "one visible key": [3.0, None, None],
    "all equal": [0.7] * 3,
    "all equal, huge": [-1e4] * 3,
    "tiny differences": [0.0, 1e-30, -1e-30],
}


@every_normalizer
@pytest.mark.parametrize("T", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", EXTREME_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rows_stay_finite_and_equal_logits_get_equal_weights(
    name: str, T: float, kind: str, dtype: torch.dtype
) -> None:
    row = EXTREME_ROWS[kind]
    mask = torch.tensor([z is not None for z in row])
    logits = torch.tensor([z or 0.0 for z in row], dtype=dtype).expand(2, 1, -1).clone().requires_grad_()
    weights = make(name, T).to(dtype)(logits, mask)
    (weights * torch.arange(3)).sum().backward()
    assert torch.isfinite(weights).all()
    assert torch.isfinite(logits.grad).all()
    if kind.startswith("all equal") and name != "top_k":
        torch.testing.assert_close(weights, weights[..., :1].expand_as(weights))
    if REGISTRY[name].properties.row_sum == "one":
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, dtype=dtype))
