"""One optimizer step of GPT-2 124M: our attention against Hugging Face's sdpa, interleaved in one run.

    python benchmarks/training_step.py --json training_step.json

Batch 1, fp32, AdamW, random weights and tokens; Linux only. Each round times one step of every variant, in an order
that rotates; a figure is the median over rounds of the ratio to sdpa in the same round. Peak memory is measured in a
fresh process per variant: the largest resident set over two steps, less what it held before the model was built.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import report
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from attnlimits.attention import attach
from attnlimits.metrics.likelihood import token_nll

VARIANTS = ("sdpa", "softmax", "ssmax", "sparsemax")
BASELINE = "sdpa"


def build(variant: str, context_length: int) -> PreTrainedModel:
    """GPT-2 124M with dropout as trained, and the variant's attention."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).train()
    if variant != BASELINE:
        attach(model, {"name": variant}, T=1.0, context_length=context_length)
    return model


def optimizer_step(model: PreTrainedModel) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(tokens: Tensor) -> None:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        token_nll(logits, tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_variants(context_length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by variant, after one step each that is not counted."""
    tokens = torch.randint(50257, (1, context_length + 1), generator=torch.Generator().manual_seed(0))
    steps = {variant: optimizer_step(build(variant, context_length)) for variant in VARIANTS}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for step in steps.values():
        step(tokens)
    for round_ in range(rounds):
        shift = round_ % len(VARIANTS)
        for variant in VARIANTS[shift:] + VARIANTS[:shift]:
            started = time.perf_counter()
            steps[variant](tokens)
            seconds[variant].append(time.perf_counter() - started)
    return seconds


def peak_mb(variant: str, context_length: int) -> float:
    """Peak resident memory that one step adds, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", variant, str(context_length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(variant: str, context_length: int) -> None:
    before = _max_rss_mb()
    step = optimizer_step(build(variant, context_length))
    for _ in range(2):
        step(torch.zeros(1, context_length + 1, dtype=torch.long))
    print(_max_rss_mb() - before)


def _max_rss_mb() -> float:
    """Peak resident set of this process. Not ru_maxrss: a child begins with that of the process that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def ratio(seconds: dict[str, list[float]], variant: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[variant], seconds[BASELINE], strict=True))


def measure(rounds: dict[int, int]) -> dict[str, float]:
    peaks = {variant: peak_mb(variant, 1024) for variant in VARIANTS}
    figures = {"sdpa_peak_mb_1024": peaks[BASELINE]}
    for variant in VARIANTS[1:]:
        figures[f"{variant}_memory_vs_sdpa_1024"] = peaks[variant] / peaks[BASELINE]
    for context_length, n_rounds in rounds.items():
        seconds = time_variants(context_length, n_rounds)
        figures[f"sdpa_seconds_{context_length}"] = statistics.median(seconds[BASELINE])
        for variant in VARIANTS[1:]:
            figures[f"{variant}_time_vs_sdpa_{context_length}"] = ratio(seconds, variant)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="One optimizer step of GPT-2 124M: ours against sdpa.")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--rounds", type=int, nargs=2, default=(8, 5), help="rounds at context 256 and 1024")
    parser.add_argument("--peak", nargs=2, metavar=("VARIANT", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        return print_peak(arguments.peak[0], int(arguments.peak[1]))
    figures = measure(dict(zip((256, 1024), arguments.rounds, strict=True)))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
