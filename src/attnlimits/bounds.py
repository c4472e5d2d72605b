"""The paper's statements as published, and beside each what can be proved: pure functions of tensors.

Every function gives a :class:`Pair`; an interval without an end has none there. "[R]": the formula is a reconstruction
from the prose and the proof outline of arXiv 2508.17821, whose displays could not be read directly. Which statements
apply to which normalizer is analysis/audit.py's to say.

Notation: a row sees n keys with logits z, weights a and representations x; I_N its N largest weights, abar their sum,
y_i = a_i x_i, s the sum of y_i over I_N, d~ the sum over i outside I_N of ||y_i - s||. D bounds |z|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-7  # of a distance in units of the longest vector, which may be the root of a difference of squares


@dataclass(frozen=True)
class Interval:
    """lower <= value <= upper; None = no statement."""

    lower: Tensor | None = None
    upper: Tensor | None = None


@dataclass(frozen=True)
class Pair:
    published: Interval
    provable: Interval


def pointwise_weights(n: Tensor, f_min: Tensor, f_max: Tensor) -> Pair:
    """Lemma 1: weights F(z_i) / sum F(z_j), where F takes values between f_min > 0 and f_max on the row's logits.

    Published: C1/n <= a <= C2/n with C1 = f_min/f_max and C2 = f_max/f_min.
    Provable: f_min/(f_min + (n-1) f_max) <= a <= f_max/(f_max + (n-1) f_min): a falls in every F(z_j) but its own and
    grows in that, so that the extremes are at the ends; both are attained.
    """
    low, high = f_min / f_max, f_max / f_min
    provable = Interval(f_min / (f_min + (n - 1) * f_max), f_max / (f_max + (n - 1) * f_min))
    return Pair(Interval(low / n, high / n), provable)


def softmax_weights(n: Tensor, logit_bound: Tensor, T: Tensor | float) -> Pair:
    """Corollary 1: Lemma 1 for F = exp(z/T), |z| <= D = ||q|| max_j ||k_j|| (scaled as the logits are).

    D takes the largest key norm: with the key's own norm the statement is false. Upper bounds >= 1 say nothing.
    """
    # In terms of exp(-2D/T) alone, for exp(D/T) overflows where T is small.
    ratio = torch.exp(-2 * logit_bound / T)
    lower = torch.where(n > 1, ratio / (ratio + (n - 1)), 1.0)  # 0/0 for n = 1 where the exponential underflows
    provable = Interval(lower, 1 / (1 + (n - 1) * ratio))
    return Pair(Interval(ratio / n, 1 / (ratio * n)), provable)


def selected_distance(
    n: Tensor,
    size: int,
    *,
    selected_mass: Tensor,
    selected_norm: Tensor,
    widest_pair: Tensor,
    longest_inside: Tensor,
    longest_outside: Tensor,
    outside_mass: Tensor,
) -> Pair:
    """Theorem 1 for the fixed set of the N largest weights, n > N.

    Published [R]: d~ <= (1 - abar) d1 + max_{j in I_N} ||x_j|| ((n - N) abar - (1 - abar)), d1 the largest
    ||x_i - x_j|| over i outside and j inside; weights sum to 1. It follows from
    a_i x_i - s = sum_j (a_i a_j/abar)(x_i - x_j) - (1 - a_i/abar) s.
    Provable: |d~ - (n - N) ||s||| <= sum over i outside of ||a_i x_i|| (the triangle inequality, term by term)
    <= outside mass times the longest x outside; for weights of any sum and sign.

    Args:
        n: (...,), visible keys.
        size: N.
        selected_mass: abar.
        selected_norm: ||s||.
        widest_pair: d1.
        longest_inside, longest_outside: the largest ||x|| in I_N and outside.
        outside_mass: sum of |a_i| outside.
    """
    rest = 1 - selected_mass
    published = rest * widest_pair + longest_inside * ((n - size) * selected_mass - rest)
    centre, width = (n - size) * selected_norm, outside_mass * longest_outside
    return Pair(Interval(upper=published), Interval((centre - width).clamp(min=0), centre + width))


def expected_distance(n: Tensor, size: int, *, mean_norms: Tensor, spread_norms: Tensor, total_norm: Tensor) -> Pair:
    """Theorem 1 for I_N uniform over all N-subsets: the expectation of d~, n > N.

    With c = N/(n-1) and Y the sum of all y, the mean of y_i - s given i outside is m_i = (1 + c) y_i - c Y, and
    V_i = N(n-1-N)/((n-1)(n-2)) (sum_{j != i} ||y_j||^2 - ||Y - y_i||^2/(n-1)) is the variance of s (n >= 3, else NaN).
    Published [R]: E d~ = ((n-N)/n) sum ||m_i|| up to a small error.
    Provable: that sum is a lower bound (Jensen), ((n-N)/n) sum sqrt(||m_i||^2 + V_i) an upper one (Jensen again, of
    the square root), and ((n-N)/n)(1+N) sum ||y_j|| another.

    Args:
        n, size: visible keys and N.
        mean_norms: sum of ||m_i||.
        spread_norms: sum of sqrt(||m_i||^2 + V_i).
        total_norm: sum of ||y_i||.
    """
    share = (n - size) / n
    exact = share * mean_norms
    return Pair(Interval(exact, exact), Interval(exact, share * torch.fmin(spread_norms, (1 + size) * total_norm)))


def limit_distance(expected: Interval, total_norm: Tensor) -> Pair:
    """Corollary 2 (i), N fixed and n large: what E d~ tends to.

    Published [R]: sum ||y_i||. False: with equal weights 1/n and one vector x for all keys d~ is (n-N)(N-1)/n ||x||,
    which tends to (N-1) ||x||, and sum ||y_i|| is ||x||.
    Provable: the interval of Theorem 1, here ``expected``. Part (ii), E d~ -> 0 as N -> n, holds: its factor n - N.
    """
    return Pair(Interval(total_norm, total_norm), expected)


def xi(top_weights: Tensor, min_distance: Tensor, radius: float = 1.0) -> Tensor:
    """xi_i of Theorem 2, (..., N): xi_i^2 = M^2 sum_{j != i} a_j^2 + (M^2 - delta^2/2) sum_{j != k, both != i} a_j a_k.

    Since ||x_j - x_k|| >= delta means x_j . x_k <= M^2 - delta^2/2, it is an upper bound of X_i = ||s - a_i x_i|| for
    weights >= 0 and ||x|| <= M: surely, not only in expectation.

    Args:
        top_weights: (..., N), the weights in I_N.
        min_distance: (...,), delta.
        radius: M.
    """
    squares = _others_squared(top_weights)
    others = top_weights.sum(-1, keepdim=True) - top_weights
    products = (others.square() - squares).clamp(min=0)
    closest = radius**2 - min_distance[..., None].square() / 2
    return (radius**2 * squares + closest * products).clamp(min=0).sqrt()


def _others_squared(a: Tensor) -> Tensor:
    """Q_i, the sum of a_j^2 over j != i in I_N."""
    return (a.square().sum(-1, keepdim=True) - a.square()).clamp(min=0)


def separable_share(top_weights: Tensor, nearest: Tensor, min_distance: Tensor, dimension: int) -> Pair:
    """Theorem 2: N_s/N for unit vectors uniform on the sphere, pairwise at least delta apart, r the nearest outsider.

    Published [R]: 1 - (1/(rN)) sum xi_i <= E N_s/N <= (1/N) sum exp(-(xi_i - r)_+^2/2). The upper form is false, for
    xi_i bounds X_i = ||s - a_i x_i|| from above (equal weights 1/32, d = 64, r = 1.2 sigma: 0.988 inside, bound 0.876).
    Provable, for fixed r and sigma_i = sqrt(Q_i), Q_i = sum_{j != i} a_j^2: sigma_i/sqrt(1 + 2/d) <= E X_i <= sigma_i
    (second and fourth moments), and X_i, sqrt(Q_i)-Lipschitz on a product of spheres whose log-Sobolev constant is
    d - 1, deviates by t with probability at most exp(-(d-1) t^2/(2 Q_i)). Hence
    P(X_i <= r) >= max(1 - sigma_i/r, 1 - exp(-(d-1)(r - sigma_i)_+^2/(2 Q_i))), and for m_i = sigma_i/sqrt(1 + 2/d)
    P(X_i <= r) <= exp(-(d-1)(m_i - r)_+^2/(2 Q_i)). Both are means over I_N here. They presume vectors that trained
    values need not be: compare with the anisotropy.

    Args:
        top_weights: (..., N), >= 0.
        nearest: (...,), r; where it is 0 the published lower bound is NaN.
        min_distance: (...,), delta.
        dimension: d.
    """
    r = nearest[..., None]
    outer = xi(top_weights, min_distance)
    published_lower = 1 - (outer / r.masked_fill(r == 0, torch.nan)).mean(-1)
    published_upper = torch.exp(-(outer - r).clamp(min=0).square() / 2).mean(-1)
    q = _others_squared(top_weights)
    sigma, tiny = q.sqrt(), torch.finfo(q.dtype).tiny
    rate = (dimension - 1) / (2 * q.clamp(min=tiny))
    markov = (1 - sigma / r).nan_to_num(nan=0.0).clamp(min=0)  # N = 1 has sigma = 0, repeated keys r = 0
    concentrated = 1 - torch.exp(-rate * (r - sigma).clamp(min=0).square())
    inner = sigma / math.sqrt(1 + 2 / dimension)
    lower = torch.maximum(markov, concentrated).mean(-1)
    upper = torch.exp(-rate * (inner - r).clamp(min=0).square()).mean(-1)
    return Pair(Interval(published_lower, published_upper), Interval(lower, upper))


def surely_inside(top_weights: Tensor, nearest: Tensor, min_distance: Tensor) -> Tensor:
    """(...,): the share of I_N with r > xi_i, by more than rounding may hide.

    N_s/N is never below it, whatever the x (weights >= 0 of sum 1 at most, ||x|| <= 1).
    """
    return (nearest[..., None] > xi(top_weights, min_distance) + ROUNDING).double().mean(-1)


def pointwise_jacobian(max_log_derivative: Tensor | float) -> Pair:
    """Lemma 2: J = (diag a - a a^T) diag(psi), psi = F'/F, for a pointwise normalizer.

    Published [R]: ||J|| <= min(1/4, sqrt 2) max|psi|, of which Corollary 3 is the case psi = 1/T.
    Provable: max|psi|/2, for ||diag a - a a^T|| is at most its largest absolute row sum, 2 a_i (1 - a_i) <= 1/2.
    """
    psi = torch.as_tensor(max_log_derivative, dtype=torch.float64)
    return Pair(Interval(upper=psi / 4), Interval(upper=psi / 2))


def softmax_jacobian(T: Tensor | float) -> Pair:
    """Corollary 3: the spectral norm of d softmax(z/T) / dz.

    Published: min(1/(4T), sqrt 2). False: two tied logits give 1/(2T). 1/(4T) bounds single entries, a (1 - a)/T, and
    sqrt 2 bounds a change of the weights, not a derivative.
    Provable: 1/(2T), attained there (Lemma 2 with psi = 1/T).
    """
    pair = pointwise_jacobian(1 / torch.as_tensor(T, dtype=torch.float64))
    return Pair(Interval(upper=pair.published.upper.clamp(max=math.sqrt(2))), pair.provable)  # type: ignore[union-attr]


def jacobian_by_weights(max_weight: Tensor, T: Tensor | float) -> Tensor:
    """||J|| of softmax is at most max a/T: diag a is at least diag a - a a^T, and both are positive semidefinite."""
    return max_weight / T


def softmax_sensitivity(T: Tensor | float, step: float) -> Pair:
    """g = ||softmax((z + eps v)/T) - softmax(z/T)|| / eps for a unit vector v.

    Published: as Corollary 3. Provable: min(1/(2T), sqrt 2/eps): the mean value theorem; the diameter of the simplex.
    """
    pair = softmax_jacobian(T)
    return Pair(pair.published, Interval(upper=pair.provable.upper.clamp(max=math.sqrt(2) / step)))  # type: ignore[union-attr]
