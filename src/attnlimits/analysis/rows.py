"""Every number of the experiments for every query row of one attention layer, in float64.

Rows are taken in blocks and each head by one core, so that the temporaries of a step find place in its cache. One sort
of a row serves every N; since a causal row does not depend on what follows it, one pass at the longest L serves every
shorter one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import bounds
from ..capacity import iterated_rows, spectral_norm
from ..metrics.distance import Terms, distance, expectations, pairwise, widest_pairs
from ..metrics.separability import anisotropy, separability, unit
from ..metrics.topn import TopN, rank_keys, top_n
from ..metrics.vanishing import vanishing
from ..normalizers import Normalizer
from ..probe import AttentionCall, LayerView
from .settings import Settings

BLOCK = 128  # rows that are measured together
SENSITIVITY_BLOCK = 16  # rows of all heads that are perturbed together
WORKERS = 4  # heads at once: more would wait for Python's lock


class Key(NamedTuple):
    """A quantity, and what it was measured at where that applies."""

    quantity: str
    N: int | None = None
    T: float | None = None
    eps: float | None = None


Rows = dict[Key, Tensor]  # (H, L), NaN where undefined


@dataclass(frozen=True)
class Head:
    """Representations of one head over the whole passage, and what all blocks of rows share."""

    x_KxD: Tensor
    unit_KxD: Tensor
    pairs_KxK: Tensor
    min_distance_K: Tensor  # of unit vectors, over the pairs that row k sees


def layer_rows(call: AttentionCall, x_HxKxD: Tensor, settings: Settings, *, seed: tuple[int, ...]) -> Rows:
    """Every quantity of a layer, for one passage.

    Args:
        call: of a batch of one passage.
        x_HxKxD: representations; H = 1 where all heads share them.
        settings: what is measured.
        seed: of the random directions; they depend on it and on the row alone.
    """
    n_heads, length = call.query_BxHxQxD.shape[1:3]
    heads = _heads(x_HxKxD, n_heads, settings)
    found: Rows = {}
    with _head_by_head(x_HxKxD.device) as over_heads:
        for start in range(0, length, BLOCK):
            rows = torch.arange(start, min(start + BLOCK, length), device=x_HxKxD.device)
            view = call.view(rows, n_keys=int(rows[-1]) + 1, dtype=torch.float64)
            for key, values in _block(call, view, rows, heads, settings, seed, over_heads):
                whole = found.setdefault(key, torch.full((n_heads, length), torch.nan, dtype=torch.float64))
                whole[:, rows] = values.cpu()
    return found


@contextmanager
def _head_by_head(device: torch.device) -> Iterator[Callable[..., Iterable[Any]]]:
    """A ``map`` that gives each head to one of a few threads, which share torch's between them."""
    n_threads = torch.get_num_threads()
    if device.type != "cpu" or n_threads == 1:
        yield map
        return
    n_workers = min(WORKERS, n_threads)
    try:
        with ThreadPoolExecutor(n_workers, "head", torch.set_num_threads, (n_threads // n_workers,)) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(n_threads)  # threads that are yet to start take over what was set last


def _heads(x_HxKxD: Tensor, n_heads: int, settings: Settings) -> list[Head]:
    made = [_head(x, settings) for x in x_HxKxD.double()]
    return made if len(made) == n_heads else made * n_heads


def _head(x: Tensor, settings: Settings) -> Head:
    u = unit(x)
    pairs = pairwise(x) if settings.bounded_sizes() else x.new_zeros(0, 0)
    return Head(x, u, pairs, _min_distances(u) if settings.runs("separability") else x.new_zeros(len(x)))


def _min_distances(unit_KxD: Tensor) -> Tensor:
    earlier = torch.ones(len(unit_KxD), len(unit_KxD), dtype=torch.bool, device=unit_KxD.device).tril(-1)
    nearest = pairwise(unit_KxD).masked_fill(~earlier, torch.inf).amin(-1)
    return nearest.cummin(0).values.double()


def _block(
    call: AttentionCall,
    view: LayerView,
    rows: Tensor,
    heads: list[Head],
    settings: Settings,
    seed: tuple[int, ...],
    over_heads: Callable[..., Iterable[Any]],
) -> Iterator[tuple[Key, Tensor]]:
    """(key, (H, R)) of a block of rows."""
    weights, mask = view.weights_BxHxRxK[0], view.mask.expand(view.weights_BxHxRxK.shape[1:])

    def measure(head: tuple[Tensor, Tensor, Head]) -> dict[Key, Tensor]:
        return _head_rows(head[0], head[1], head[2], rows, settings)

    by_head = list(over_heads(measure, zip(weights, mask, heads, strict=True)))
    for key in by_head[0]:
        yield key, torch.stack([values[key] for values in by_head])
    if settings.runs("gradient_sensitivity", "vanishing"):
        yield Key("jacobian_norm"), _jacobian(view)
    if settings.runs("vanishing") and view.normalizer.rescales_rows:
        yield from _weight_bounds(call, view, rows)
    if settings.runs("gradient_sensitivity"):
        yield from _sensitivities(call, view, rows, settings, seed)


@torch.no_grad()  # which is a thread's own
def _head_rows(weights: Tensor, mask: Tensor, head: Head, rows: Tensor, settings: Settings) -> dict[Key, Tensor]:
    n_keys = weights.shape[-1]
    visible = mask.double()
    found: dict[Key, Tensor] = {}
    if settings.runs("vanishing", "separability"):
        shares = vanishing(weights, mask) | anisotropy(head.x_KxD[:n_keys], mask)
        found |= {Key(name): value for name, value in shares.items()}
    sizes = sorted({*settings.distance_sizes(), *settings.separability_sizes()})
    tops = {}
    if sizes:
        ranked = rank_keys(weights, mask)
        tops = {size: top_n(ranked, visible, size) for size in sizes if size < n_keys}
    if wanted := [tops[size] for size in settings.distance_sizes() if size in tops]:
        bounded = [top for top in wanted if top.size in settings.bounded_sizes()]
        pairs = head.pairs_KxK[:n_keys, :n_keys]
        widest = widest_pairs(pairs, ranked, bounded) if bounded else []
        d1 = {top.size: value for top, value in zip(bounded, widest, strict=True)}
        found |= _distances(Terms(weights, head.x_KxD[:n_keys], visible), wanted, d1)
    if wanted := [tops[size] for size in settings.separability_sizes() if size in tops]:
        of_unit = Terms(weights, head.unit_KxD[:n_keys], visible)
        found |= _separabilities(of_unit, wanted, head.min_distance_K[rows], settings)
    return found


def _distances(of: Terms, tops: list[TopN], widest: dict[int, Tensor]) -> dict[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for top in tops:
        values = distance(of, top, widest=widest.get(top.size)) | expectations(of, top)
        found |= {Key(name, N=top.size): value for name, value in values.items()}
    return found


def _separabilities(of: Terms, tops: list[TopN], min_distance: Tensor, settings: Settings) -> dict[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for top in tops:
        values = separability(of, top)
        if settings.runs("separability"):
            values |= _theorem_2(of, top, values["nearest_outsider"], min_distance)
        found |= {Key(name, N=top.size): value for name, value in values.items()}
    return found


def _theorem_2(of: Terms, top: TopN, nearest: Tensor, min_distance: Tensor) -> dict[str, Tensor]:
    a = top.take(of.weights)
    pair = bounds.separable_share(a, nearest, min_distance, of.x.shape[-1])
    values = {
        "separability_published_lower": pair.published.lower,
        "separability_published_upper": pair.published.upper,
        "separability_lower": pair.provable.lower,
        "separability_upper": pair.provable.upper,
        "separability_sure": bounds.surely_inside(a, nearest, min_distance),
    }
    # xi_i bounds products of weights: rows with a negative one are left out.
    defined = top.valid & (a >= 0).all(-1)
    return {name: value.masked_fill(~defined, torch.nan) for name, value in values.items()}  # type: ignore[union-attr]


def _jacobian(view: LayerView) -> Tensor:
    """(H, R); NaN at the rows that a power iteration leaves out."""
    weights = view.weights_BxHxRxK
    norm = spectral_norm(view.normalizer, view.logits_BxHxRxK, weights, view.mask.expand_as(weights))[0]
    n_rows = weights.shape[-2]
    if norm.shape[-1] == n_rows:
        return norm
    whole = torch.full(weights.shape[1:3], torch.nan, dtype=torch.float64, device=weights.device)
    whole[:, iterated_rows(n_rows)] = norm
    return whole


def row_factor(normalizer: Normalizer, n_visible: Tensor) -> Tensor:
    """By what a normalizer of the softmax family multiplies the logits of rows of n keys, (1 or H, R)."""
    scale = normalizer.row_scale(n_visible[None])
    return torch.ones(1, len(n_visible), dtype=torch.float64) if scale is None else scale.double().flatten(0, -2).abs()


def _weight_bounds(call: AttentionCall, view: LayerView, rows: Tensor) -> Iterator[tuple[Key, Tensor]]:
    """Corollary 1: D = ||q|| max_j ||k_j|| over the keys that the row sees."""
    q = call.query_BxHxQxD[0, :, rows].double().norm(dim=-1)
    k = call.key_BxHxKxD[0].double().norm(dim=-1).cummax(-1).values[:, rows]
    n = (rows + 1).double()
    logit_bound = q * k * abs(call.scaling) * row_factor(view.normalizer, rows + 1).to(q.device)
    pair = bounds.softmax_weights(n, logit_bound, view.normalizer.T)
    yield Key("max_weight_published"), pair.published.upper  # type: ignore[misc]
    yield Key("max_weight_upper"), pair.provable.upper  # type: ignore[misc]
    yield Key("min_weight_published"), pair.published.lower  # type: ignore[misc]
    yield Key("min_weight_lower"), pair.provable.lower  # type: ignore[misc]
    weights = view.weights_BxHxRxK[0]
    yield Key("min_weight"), weights.masked_fill(~view.mask.expand_as(weights), torch.inf).amin(-1)


def _sensitivities(
    call: AttentionCall, view: LayerView, rows: Tensor, settings: Settings, seed: tuple[int, ...]
) -> Iterator[tuple[Key, Tensor]]:
    """g(T, eps) of every row: how far a step eps in a random direction moves the weights, over eps."""
    logits, mask = view.logits_BxHxRxK, view.mask
    if settings.logits == "raw":
        logits = logits / call.scaling
    directions = torch.stack([_direction((*seed, row), logits.shape[-1]) for row in rows.tolist()]).to(logits.device)
    parts = [t.split(SENSITIVITY_BLOCK, dim=-2) for t in (logits, mask.expand_as(logits), directions)]
    found: dict[Key, list[Tensor]] = {}
    for z, visible, v in zip(*parts, strict=True):
        for T in settings.temperatures:
            factor = view.normalizer.T / T  # the normalizer divides by its own
            at_rest = view.normalizer(z * factor, visible)
            for eps in settings.steps:
                moved = view.normalizer(torch.add(z, v, alpha=eps).mul_(factor), visible)
                g = moved.sub_(at_rest).square_().sum(-1).sqrt()[0] / eps
                found.setdefault(Key("sensitivity", T=T, eps=eps), []).append(g)
    for key, pieces in found.items():
        yield key, torch.cat(pieces, dim=-1)


def _direction(seed: tuple[int, ...], n_keys: int) -> Tensor:
    """A uniform unit vector over the keys that row ``seed[-1]`` sees; 0 at the keys after it. (K,)"""
    v = np.zeros(n_keys)
    n = seed[-1] + 1
    v[:n] = np.random.default_rng(seed).standard_normal(n)
    return torch.from_numpy(v / np.linalg.norm(v))
