"""Every key that a training run logs: what it is, its range, how to read it. docs/metrics.md is generated from it.

``N`` in a key stands for a number of callbacks.attention_probe.top_n, or for a context length. Attention and normalizer
keys also come with ``/layer_07`` at their end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        key: as logged, N for a number.
        formula: of one row for attention metrics; the logged value is the mean over rows, heads and layers.
        span: the range of values.
        reading: how to read it.
    """

    key: str
    formula: str
    span: str
    reading: str


SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Loss and speed": (
        Entry("train/loss", "mean -ln p(token) of the step's batches", ">= 0", "nats a token"),
        Entry("train/lr", "learning rate of the step", "> 0", "warm-up, then cosine"),
        Entry("train/tokens_per_second", "predicted tokens / seconds in training steps", "> 0", "validation excluded"),
        Entry("val/loss", "mean -ln p(token) of the validation blocks", ">= 0", "before the first step too"),
        Entry("val/perplexity", "exp(val/loss)", ">= 1", ""),
        Entry("val/bits_per_character", "val/loss / ln 2 / characters a token", ">= 0", "comparable across tokenizers"),
    ),
    "Vanishing": (
        Entry("attention/max_weight", "max a", "0..1 where rows sum to 1", "near 1: one key takes all"),
        Entry("attention/max_weight_times_n", "n max a", "1..n", "1: no key stands out of the uniform weight 1/n"),
        Entry("attention/entropy", "H(p) / ln n", "0..1", "1: uniform, 0: one key. Rows of n >= 2"),
        Entry("attention/effective_keys", "1 / sum p^2", "1..n", "keys that share the weight"),
        Entry("attention/effective_keys_entropy", "exp H(p)", "1..n", "the same, with more regard to small weights"),
        Entry("attention/top_mass", "sum of the top_k largest p", "0..1", "what the largest keys hold together"),
        Entry("attention/first_key_mass", "p of the first visible key", "0..1", "high: the first token is a sink"),
        Entry("attention/support", "number of a_i other than 0", "0..n", "n for softmax"),
        Entry("attention/zeros", "share of visible keys with a_i = 0", "0..1", "exact zeros of sparse normalizers"),
        Entry("attention/row_sum", "sum a", "see docs/normalizers.md", "1 for normalizers that sum to one"),
        Entry(
            "attention/max_weight_slope",
            "slope of ln max a against ln n over the rows of a head",
            "about -1..0",
            "-1: vanishes as 1/n; 0: does not vanish",
        ),
        Entry("attention/max_weight_slope_error", "standard error of that slope", ">= 0", "of the least-squares fit"),
    ),
    "Distance": (
        Entry(
            "attention/distance_nN", "d~ = sum over i outside I_N of ||a_i x_i - s||", ">= 0", "grows as (n - N) ||s||"
        ),
        Entry("attention/selected_norm_nN", "||s||, s = sum over I_N of a_i x_i", ">= 0", "what d~ measures"),
        Entry(
            "attention/distance_lower_nN",
            "provable lower bound: (n - N)||s|| - (sum outside a) max ||x||",
            ">= 0",
            "P2",
        ),
        Entry(
            "attention/distance_upper_nN",
            "provable upper bound: (n - N)||s|| + (sum outside a) max ||x||",
            ">= 0",
            "P2",
        ),
        Entry("attention/distance_slack_nN", "provable upper bound - d~", ">= 0", "0: the bound is exact"),
        Entry(
            "attention/distance_published_nN",
            "(1 - abar) d1 + max ||x_j|| ((n - N) abar - (1 - abar))",
            "",
            "Theorem 1 as published; only where rows sum to 1",
        ),
        Entry(
            "attention/distance_published_slack_nN", "published bound - d~", ">= 0 where it holds", "loose when large"
        ),
        Entry(
            "attention/expected_distance_lower_nN",
            "((n - N)/n) sum ||(1 + c) a_i x_i - c sum a_j x_j||, c = N/(n - 1)",
            ">= 0",
            "below E d~ for a random I_N (P3); also the published main sum",
        ),
        Entry(
            "attention/expected_distance_upper_nN",
            "the same with the variance of the selected sum under the root",
            ">= 0",
            "above E d~ for a random I_N (P3); rows of n >= 3",
        ),
        Entry(
            "attention/expected_distance_no_factor_nN",
            "((n - N)/n) sum ||2 a_i x_i - sum a_j x_j||",
            ">= 0",
            "no expectation of anything, but the reading under which the paper's figures come out",
        ),
    ),
    "Separability": (
        Entry(
            "attention/separability_nN",
            "N_s/N: share of I_N nearer to s than the nearest outsider, x of unit length",
            "0..1",
            "the paper sees 0.7 to 0.85; rows of n > N",
        ),
        Entry("attention/anisotropy", "mean cosine of the visible values' pairs", "-1..1", "near 1: values alike"),
        Entry("attention/spread", "root mean square distance of the visible values from their mean", ">= 0", ""),
    ),
    "Gradients of attention": (
        Entry(
            "attention/jacobian_norm", "||d a / d logits||_2 of a row, 1/T included", ">= 0", "what a logit can move"
        ),
        Entry("attention/jacobian_norm_max", "the largest over a head's rows", ">= 0", "mean over heads"),
        Entry(
            "attention/jacobian_vs_provable",
            "norm / (1/(2T))",
            "0..1 for softmax",
            "above 1: sharper than softmax can be",
        ),
        Entry("attention/jacobian_vs_published", "norm / (1/(4T))", ">= 0", "above 1 contradicts the published bound"),
        Entry(
            "attention/jacobian_above_published", "share of rows with norm > 1/(4T)", "0..1", "violations of Lemma 2"
        ),
        Entry(
            "attention/logit_gradient",
            "root mean square over rows of ||d loss / d logits||, loss summed over tokens, in nats",
            ">= 0",
            "the gradient that vanishes with saturated attention",
        ),
    ),
    "Verdicts": (
        Entry("attention/verdict_healthy", "share of heads to which none of the others applies", "0..1", ""),
        Entry(
            "attention/verdict_saturated", "separability at most the threshold", "0..1", "top keys are not told apart"
        ),
        Entry("attention/verdict_vanishing", "slope or entropy beyond the threshold", "0..1", "weights go as 1/n"),
        Entry("attention/verdict_sharp", "mean Jacobian norm at least the threshold", "0..1", "large gradients"),
    ),
    "Gradients of parameters": (
        Entry(
            "gradients/norm",
            "L2 norm of the step's whole gradient, before clipping",
            ">= 0",
            "above trainer.clip: clipped",
        ),
        Entry("gradients/norm_clipped", "min(norm, trainer.clip)", ">= 0", "what the optimizer sees"),
        Entry("gradients/attention", "of the attention layers' parameters", ">= 0", "before clipping, as all below"),
        Entry("gradients/mlp", "of the mlp layers' parameters", ">= 0", ""),
        Entry("gradients/embeddings", "of token and position embeddings", ">= 0", "tied output weights among them"),
        Entry("gradients/normalizer", "of the normalizers' own parameters", ">= 0", "where they have any"),
        Entry("gradients/other", "of all other parameters", ">= 0", "layer norms, an untied output"),
        Entry("gradients/layer_*", "of one block", ">= 0", ""),
    ),
    "Length extrapolation": (
        Entry(
            "extrapolation/loss_nN",
            "mean -ln p(token) in contexts of N tokens, when training ends",
            ">= 0",
            "N = 0.5x, 1x, 2x, ... the trained context; the same tokens for all. By position: extrapolation.csv",
        ),
        Entry("extrapolation/perplexity_nN", "exp of it", ">= 1", "rising with N: the model does not extrapolate"),
    ),
    "Learned parameters of the normalizer": (
        Entry(
            "normalizer/*", "mean over layers and heads, as it acts: s, b, T, alpha, sigma, tau, m, beta, gamma", "", ""
        ),
    ),
}


def generic(key: str) -> str:
    """The catalogue's key of a logged one."""
    key = re.sub(r"^gradients/layer_\d+$", "gradients/layer_*", key)
    key = re.sub(r"^normalizer/.*", "normalizer/*", key)
    return re.sub(r"_n\d+$", "_nN", re.sub(r"/layer_\d+$", "", key))


def keys() -> set[str]:
    return {entry.key for entries in SECTIONS.values() for entry in entries}


HEADER = """# Metrics

Generated by `python -m attnlimits.metrics` from src/attnlimits/metrics/catalogue.py; a test holds it against what a
run logs. The x axis of all is optimizer steps done (`step` in metrics.csv, `trainer/global_step` in W&B); 0 is the
pretrained model.

Attention metrics are taken on a fixed probe batch from the beginning of the validation split, in eval mode and float32,
on `callbacks.attention_probe.rows` query rows that are spread over the length. They are means over rows, heads and
layers; `attention/<metric>/layer_07` is the mean over one layer's heads; heads.parquet in the run directory has every
head. A value that is undefined (a row that sees no more than N keys, a row without weight) is left out of the means.
a is a row of weights, n the keys it sees, p = |a| / sum |a|, x_i the value vector of key i, I_N the N keys of largest
weight (ties to the earlier key), z the logits before the division by T. Distances are of x as it is; separability of x
scaled to unit length, as in the paper (arXiv 2508.17821).

A head's verdict is the first that applies of sharp, vanishing, saturated; else it is healthy. The thresholds are
options of `callbacks.attention_probe`; src/attnlimits/metrics/verdict.py says where the defaults come from.
"""


def markdown() -> str:
    """The whole of docs/metrics.md."""
    lines = [HEADER.rstrip("\n")]
    for title, entries in SECTIONS.items():
        lines += ["", f"## {title}", "", "| key | formula | range | reading |", "|---|---|---|---|"]
        for entry in entries:
            cells = (f"`{entry.key}`", entry.formula, entry.span, entry.reading)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
