"""Every normalizer's forward and backward against torch.softmax, interleaved in one run, and the sparse ones' error.

    python benchmarks/normalizers.py --json normalizers.json

Logits (12, 1024, 1024) in float32: causal, N(0, 1) and N(0, 0.1) rows. A ratio is the median over rounds of a round's
time to softmax's in that round, the worst of the inputs. The error is the largest against the solver in float64, which
the tests hold against bisection.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from figures import report
from torch import Tensor

from attnlimits.normalizers import REGISTRY, Normalizer, make_normalizer
from attnlimits.normalizers.entmax import entmax

SHAPE = (12, 1024, 1024)
SPARSE = {"sparsemax": 2.0, "entmax15": 1.5}  # with their alpha


def inputs(shape: tuple[int, int, int]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Logits and mask by the name of the input."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(shape[1:], dtype=torch.bool).tril()
    return {"causal": (noise, causal), "normal": (noise, None), "tiny normal": (noise * 0.1, None)}


def make(name: str, shape: tuple[int, int, int]) -> Normalizer:
    return make_normalizer({"name": name}, T=1.0, n_heads=shape[0], context_length=shape[-1])


def seconds(normalizer: Normalizer, logits: Tensor, mask: Tensor | None, grad: Tensor) -> float:
    logits = logits.detach().requires_grad_()
    started = time.perf_counter()
    normalizer(logits, mask).backward(grad)
    return time.perf_counter() - started


def ratios(logits: Tensor, mask: Tensor | None, rounds: int) -> dict[str, float]:
    """Every normalizer's time to softmax's, the median over rounds after one that is not counted."""
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    normalizers = {name: make(name, tuple(logits.shape)) for name in REGISTRY}  # type: ignore[arg-type]
    rows = [
        {name: seconds(normalizer, logits, mask, grad) for name, normalizer in normalizers.items()}
        for _ in range(rounds + 1)
    ][1:]
    return {name: statistics.median(row[name] / row["softmax"] for row in rows) for name in REGISTRY}


def max_error(name: str, logits: Tensor, mask: Tensor | None) -> float:
    exact = entmax(logits.double(), SPARSE[name], mask)
    return (make(name, tuple(logits.shape))(logits, mask).double() - exact).abs().max().item()  # type: ignore[arg-type]


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    cases = inputs(shape).values()
    by_case = [ratios(logits, mask, rounds) for logits, mask in cases]
    worst = {name: max(case[name] for case in by_case) for name in REGISTRY}
    figures = {f"{name}_eager_vs_softmax" if name in SPARSE else f"{name}_vs_softmax": worst[name] for name in worst}
    for name in SPARSE:
        figures[f"{name}_max_error"] = max(max_error(name, logits, mask) for logits, mask in cases)
    return {name: figures[name] for name in sorted(figures) if name != "softmax_vs_softmax"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Every normalizer's forward and backward against torch.softmax.")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    report(measure(SHAPE, arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
