"""One model and some passages in, the tables of every experiment out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import attach, attention_layers, detach
from ..metrics.vanishing import log_slope
from ..metrics.verdict import VERDICTS, verdict
from ..normalizers import Normalizer
from ..probe import AttentionCall, each_layer
from .audit import audit, audit_rows
from .claims import Evidence, claims
from .rows import Key, Rows, layer_rows
from .settings import Settings
from .tables import critical, curves, layer_table


@dataclass(frozen=True)
class Analysis:
    """What an analysis found; docs/analysis.md lists the columns.

    Attributes:
        results: the tidy table: experiment, passage, layer, head, L, N, T, eps, quantity, value, rows, rows_left_out.
        curves: over heads and passages, with a bootstrap band.
        critical: the Kolmogorov-Smirnov tests of critical_topn.
        audit: every bound: shares of rows and heads that violate it, slack, whether it says anything.
        heads: a row a layer and head, with the verdict.
        claims: claim of the paper, what is shown, verdict.
        settings: with which it was made.
        length, n_passages: of the token ids.
        normalizer, T: of the model.
    """

    results: pd.DataFrame
    curves: pd.DataFrame
    critical: pd.DataFrame
    audit: pd.DataFrame
    heads: pd.DataFrame
    claims: pd.DataFrame
    settings: Settings
    length: int
    n_passages: int
    normalizer: str
    T: float

    def tables(self) -> dict[str, pd.DataFrame]:
        """Those that are files of a report."""
        names = ("results", "curves", "critical", "audit", "heads", "claims")
        return {name: table for name in names if not (table := getattr(self, name)).empty}


def analyze(
    model: PreTrainedModel,
    input_ids_PxL: Tensor,
    settings: Settings | None = None,
    *,
    after_layer: Callable[[], None] = lambda: None,
) -> Analysis:
    """Run the experiments of ``settings`` on every attention layer, one passage at a time.

    Computed in float64 from the model's queries, keys and values. Memory grows with the square of L for one layer, not
    with layers or passages.

    Args:
        model: any decoder that goes through Hugging Face's attention interface; one without a normalizer is analysed
            under softmax at T = 1, which is what it computes, and handed back as it was.
        input_ids_PxL: passages without padding; L at least 4.
        settings: None = the defaults.
        after_layer: called after each layer of each passage, layers * passages times.

    Raises:
        ValueError: a weight of the model is not finite (named), or the passages are shorter than 4 tokens.
    """
    settings = settings or Settings()
    n_passages, length = input_ids_PxL.shape
    if length < 4:
        raise ValueError(f"passages of {length} tokens: at least 4 are needed")
    refuse_not_finite(model)
    found = _Found([], [], [])
    with _with_normalizer(model, length), torch.no_grad():
        normalizer = _normalizer(model)
        for passage, ids in enumerate(input_ids_PxL):
            _measure(model, ids[None], settings, passage, found, after_layer)
        return _assemble(found, settings, normalizer, length, n_passages)


@dataclass(frozen=True)
class _Found:
    """A table of each kind a layer and passage."""

    results: list[pd.DataFrame]
    audit: list[pd.DataFrame]
    heads: list[pd.DataFrame]


def refuse_not_finite(model: torch.nn.Module) -> None:
    """Raises ValueError for the first parameter that holds NaN or inf."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"the weight {name} holds NaN or inf")


@contextmanager
def _with_normalizer(model: PreTrainedModel, length: int) -> Iterator[None]:
    layers = [layer for _, layer in attention_layers(model)]
    if layers and all(isinstance(getattr(layer, "normalizer", None), Normalizer) for layer in layers):
        yield
        return
    implementation = model.config._attn_implementation
    attach(model, {"name": "softmax"}, T=1.0, context_length=length)
    try:
        yield
    finally:
        detach(model, implementation)


def _normalizer(model: PreTrainedModel) -> Normalizer:
    _, layer = next(attention_layers(model))
    assert isinstance(layer.normalizer, Normalizer)
    return layer.normalizer


def _measure(
    model: PreTrainedModel,
    ids_1xL: Tensor,
    settings: Settings,
    passage: int,
    found: _Found,
    after_layer: Callable[[], None],
) -> None:
    def visit(call: AttentionCall) -> None:
        rows = layer_rows(
            call, _representations(call, model, ids_1xL, settings), settings, seed=(settings.seed, passage, call.index)
        )
        place = {"passage": passage, "layer": call.index}
        found.results.append(layer_table(rows, settings, **place))
        found.audit.append(audit_rows(rows, call.normalizer, settings, **place))
        found.heads.append(_head_table(rows, settings, **place))
        after_layer()

    each_layer(model, ids_1xL, visit)


def _representations(call: AttentionCall, model: PreTrainedModel, ids_1xL: Tensor, settings: Settings) -> Tensor:
    """x (H or 1, K, D)."""
    if settings.representation == "value":
        return call.value_BxHxKxD[0]
    if settings.representation == "hidden":
        return call.hidden_BxKxE
    return model.get_input_embeddings()(ids_1xL)


def _head_table(rows: Rows, settings: Settings, *, passage: int, layer: int) -> pd.DataFrame:
    """Means over the rows of one passage."""
    columns = {"passage": passage, "layer": layer, "head": range(next(iter(rows.values())).shape[0])}
    names = ("max_weight", "entropy", "first_key_mass", "zeros", "anisotropy", "jacobian_norm")
    columns |= {name: rows[Key(name)].nanmean(-1).numpy() for name in names if Key(name) in rows}
    if Key("max_weight") in rows:
        n = torch.arange(1, rows[Key("max_weight")].shape[-1] + 1)
        slope, error = log_slope(rows[Key("max_weight")], n)
        columns |= {"max_weight_slope": slope.numpy(), "max_weight_slope_error": error.numpy()}
    for quantity, N in (("separability", settings.verdict_n), ("distance", settings.length_n)):
        if (key := Key(quantity, N=N)) in rows:
            columns[f"{quantity}_n{N}"] = rows[key].nanmean(-1).numpy()
    return pd.DataFrame(columns)


def _with_verdict(heads: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """Passages averaged; a word a head where all that it is decided by was measured."""
    means = heads.drop(columns="passage").groupby(["layer", "head"]).mean().reset_index()
    needed = ("max_weight_slope", "entropy", f"separability_n{settings.verdict_n}", "jacobian_norm")
    if set(needed) <= set(means.columns):
        slope, entropy, separable, jacobian = (torch.tensor(means[name].to_numpy(copy=True)) for name in needed)
        found = verdict(slope, entropy, separable, jacobian, settings.thresholds)
        means["verdict"] = [VERDICTS[index] for index in found.tolist()]
    return means


def _assemble(found: _Found, settings: Settings, normalizer: Normalizer, length: int, n_passages: int) -> Analysis:
    results = pd.concat(found.results, ignore_index=True)
    evidence = Evidence(
        curves=curves(results, seed=settings.seed),
        audit=audit(pd.concat(found.audit, ignore_index=True)),
        critical=critical(results, settings) if settings.runs("critical_topn") else pd.DataFrame(),
        heads=_with_verdict(pd.concat(found.heads, ignore_index=True), settings),
        normalizer=normalizer,
        settings=settings,
    )
    return Analysis(
        results=results,
        curves=evidence.curves,
        critical=evidence.critical,
        audit=evidence.audit,
        heads=evidence.heads,
        claims=claims(evidence),
        settings=settings,
        length=length,
        n_passages=n_passages,
        normalizer=normalizer.name,
        T=normalizer.T,
    )
