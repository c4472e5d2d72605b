"""Every normalizer's forward and backward against torch.softmax and the package entmax, interleaved in one run.

    pip install entmax
    python benchmarks/normalizers.py --json normalizers.json

Logits (12, 1024, 1024) in float32, three inputs: N(0, 1) under a causal mask, N(0, 1), N(0, 0.1). softmax and the
package get the mask as users of them give it, filled with -inf. Each normalizer is timed right after softmax, and its
time taken to that one; a figure is the median over rounds, the worst of the inputs: NAME_vs_softmax (below 1 = faster
than softmax), NAME_vs_entmax (how many times faster than the package's sort). The error is the largest against
float64; memory is the peak above the inputs, of a process of its own (Linux only), as a ratio to softmax's.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import entmax as package
import torch
from figures import report, status_mb
from torch import Tensor

from attnlimits.normalizers import REGISTRY, make_normalizer, newton
from attnlimits.normalizers.entmax import entmax

SHAPE = (12, 1024, 1024)
BASELINE = "baseline"
SPARSE = {"sparsemax": 2.0, "entmax15": 1.5}  # with their alpha
WAYS = {"compiled": "on", "eager": "off"}
Weights = Callable[[Tensor, Tensor | None], Tensor]


def inputs() -> dict[str, tuple[Tensor, Tensor | None]]:
    """Logits and mask by the name of the input."""
    noise = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(SHAPE[1:], dtype=torch.bool).tril()
    return {"causal": (noise, causal), "normal": (noise, None), "tiny normal": (noise * 0.1, None)}


def filled(function: Callable[..., Tensor]) -> Weights:
    def apply(logits: Tensor, mask: Tensor | None) -> Tensor:
        return function(logits if mask is None else logits.masked_fill(~mask, -torch.inf), dim=-1)

    return apply


def ours(name: str, compile_mode: str = "off") -> Weights:
    normalizer = make_normalizer({"name": name}, T=1.0, n_heads=SHAPE[0], context_length=SHAPE[-1])

    def apply(logits: Tensor, mask: Tensor | None) -> Tensor:
        if name in SPARSE:
            newton.set_compile(compile_mode)
        return normalizer(logits, mask)

    return apply


def contestants() -> dict[str, Weights]:
    """By name, as far as a figure's name begins."""
    found = {BASELINE: filled(torch.softmax)}
    for name in REGISTRY:
        if name in SPARSE:
            found |= {f"{name}_{way}": ours(name, mode) for way, mode in WAYS.items()}
            found[f"{name}_package"] = filled(getattr(package, name))
        else:
            found[name] = ours(name)
    return found


def seconds(weights: Weights, logits: Tensor, mask: Tensor | None, grad: Tensor) -> float:
    logits = logits.detach().requires_grad_()
    started = time.perf_counter()
    weights(logits, mask).backward(grad)
    return time.perf_counter() - started


def time_rounds(logits: Tensor, mask: Tensor | None, rounds: int) -> list[dict[str, float]]:
    """Every contestant's time to that of softmax right before it, by round, after a round that is not counted."""
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    running = contestants()
    softmax = running.pop(BASELINE)
    rows: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        rows.append({})
        for name, weights in running.items():
            before = seconds(softmax, logits, mask, grad)
            rows[-1][name] = seconds(weights, logits, mask, grad) / before
    return rows[1:]


def speed_figures(by_input: list[list[dict[str, float]]]) -> dict[str, float]:
    figures = {}
    for name in sorted(by_input[0][0]):
        if not name.endswith("_package"):
            figures[f"{name}_vs_softmax"] = max(statistics.median(row[name] for row in rows) for rows in by_input)
        if name.endswith(("_compiled", "_eager")):
            sort = name.rsplit("_", 1)[0] + "_package"
            figures[f"{name}_vs_entmax"] = min(
                statistics.median(row[sort] / row[name] for row in rows) for rows in by_input
            )
    return figures


def max_error(name: str, logits: Tensor, mask: Tensor | None) -> float:
    """The larger error of the two ways, against the eager one in float64; the tests hold that against other methods."""
    newton.set_compile("off")
    exact = entmax(logits.double(), SPARSE[name], mask)
    return max((ours(name, mode)(logits, mask).double() - exact).abs().max().item() for mode in WAYS.values())


def print_peak(contestant: str, input_name: str) -> None:
    """MB that one forward and backward needs above its inputs; compiling is over before."""
    logits, mask = inputs()[input_name]
    weights, grad = contestants()[contestant], torch.ones(SHAPE)
    few = logits[:, :64].clone()
    seconds(weights, few, None, torch.ones_like(few))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status_mb("VmRSS")
    seconds(weights, logits, mask, grad)
    print(status_mb("VmHWM") - before)


def peak_mb(contestant: str, input_name: str) -> float:
    command = [sys.executable, __file__, "--peak", contestant, input_name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def memory_figures() -> dict[str, float]:
    figures = {}
    for name in SPARSE:
        worst = 0.0
        for kind in inputs():
            softmax = peak_mb(BASELINE, kind)
            worst = max(worst, *(peak_mb(f"{name}_{way}", kind) / softmax for way in WAYS))
        figures[f"{name}_memory_vs_softmax"] = worst
    return figures


def measure(rounds: int) -> dict[str, float]:
    figures = memory_figures()
    figures |= speed_figures([time_rounds(logits, mask, rounds) for logits, mask in inputs().values()])
    for name in SPARSE:
        figures[f"{name}_max_error"] = max(max_error(name, logits, mask) for logits, mask in inputs().values())
    return dict(sorted(figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Forward and backward of every normalizer against torch.softmax.")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", nargs=2, metavar=("CONTESTANT", "INPUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        return print_peak(*arguments.peak)
    report(measure(arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
