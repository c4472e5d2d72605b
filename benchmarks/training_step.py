"""One optimizer step of GPT-2 124M with every normalizer against Hugging Face's sdpa, interleaved in one run.

    python benchmarks/training_step.py --json training_step.json
    python benchmarks/training_step.py --variants softmax sparsemax --rounds 8 5

Batch 1, fp32, AdamW, random weights and tokens; Linux only. One model takes every variant in turn; each round times one
step of each, in an order that rotates; a figure is the median over rounds of the ratio to sdpa in the same round.
Sparse normalizers are compiled where that works, before anything is timed. Peak memory is measured in a fresh process
per variant: the peak resident set over two steps, less what it held before the model was built.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from figures import report, status_mb
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from attnlimits.attention import attach
from attnlimits.metrics.likelihood import token_nll
from attnlimits.normalizers import REGISTRY, newton

BASELINE = "sdpa"


def build() -> PreTrainedModel:
    """GPT-2 124M with dropout as trained."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).train()


def give(model: PreTrainedModel, variant: str, context_length: int) -> None:
    """The variant's attention, in place."""
    if variant == BASELINE:
        model.set_attn_implementation(BASELINE)
    else:
        attach(model, {"name": variant}, T=1.0, context_length=context_length)


def optimizer_step(model: PreTrainedModel) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(tokens: Tensor) -> None:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        token_nll(logits, tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_variants(variants: Sequence[str], context_length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by variant, after one step each that is not counted."""
    tokens = torch.randint(50257, (1, context_length + 1), generator=torch.Generator().manual_seed(0))
    model = build()
    step = optimizer_step(model)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for round_ in range(rounds + 1):
        shift = round_ % len(variants)
        for variant in [*variants[shift:], *variants[:shift]]:
            give(model, variant, context_length)
            started = time.perf_counter()
            step(tokens)
            seconds[variant].append(time.perf_counter() - started)
    return {variant: found[1:] for variant, found in seconds.items()}


def peak_mb(variant: str, context_length: int) -> float:
    """Peak resident memory that one step adds, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", variant, str(context_length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(variant: str, context_length: int) -> None:
    _compile_solvers(variant)
    Path("/proc/self/clear_refs").write_text("5")  # compiling has a peak of its own
    before = status_mb("VmRSS")
    model = build()
    give(model, variant, context_length)
    step = optimizer_step(model)
    for _ in range(2):
        step(torch.zeros(1, context_length + 1, dtype=torch.long))
    print(status_mb("VmHWM") - before)


def _compile_solvers(variant: str) -> None:
    if variant != BASELINE:
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=64)).train()
        give(model, variant, 256)
        optimizer_step(model)(torch.zeros(1, 257, dtype=torch.long))


def ratio(seconds: dict[str, list[float]], variant: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[variant], seconds[BASELINE], strict=True))


def measure(variants: Sequence[str], rounds: dict[int, int]) -> dict[str, float]:
    peaks = {variant: peak_mb(variant, 1024) for variant in (BASELINE, *variants)}
    figures = {"sdpa_peak_mb_1024": peaks[BASELINE]}
    for variant in variants:
        figures[f"{variant}_memory_vs_sdpa_1024"] = peaks[variant] / peaks[BASELINE]
    for context_length, n_rounds in rounds.items():
        seconds = time_variants((BASELINE, *variants), context_length, n_rounds)
        figures[f"sdpa_seconds_{context_length}"] = statistics.median(seconds[BASELINE])
        for variant in variants:
            figures[f"{variant}_time_vs_sdpa_{context_length}"] = ratio(seconds, variant)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="One optimizer step of GPT-2 124M: every normalizer against sdpa.")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--rounds", type=int, nargs=2, default=(8, 5), help="rounds at context 256 and 1024")
    parser.add_argument("--variants", nargs="+", choices=sorted(REGISTRY), default=sorted(REGISTRY))
    parser.add_argument("--peak", nargs=2, metavar=("VARIANT", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    newton.set_compile("auto")
    if arguments.peak:
        return print_peak(arguments.peak[0], int(arguments.peak[1]))
    rounds = {length: n for length, n in zip((256, 1024), arguments.rounds, strict=True) if n}
    report(measure(arguments.variants, rounds), arguments.json)


if __name__ == "__main__":
    main()
