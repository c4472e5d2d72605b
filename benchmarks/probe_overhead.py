"""What measuring costs while GPT-2 124M trains: the probe against an optimizer step, interleaved in one run.

    python benchmarks/probe_overhead.py --json probe_overhead.json

Batch 1, fp32, AdamW, random weights and tokens, conf/callbacks/default.yaml's settings; Linux only. Figures:

probe_vs_step           time of one probe (metrics and logit gradients) to one optimizer step at context 1024, the
                        median over rounds
training_slowdown       1 + what the callbacks add to a step at their default cadence, from the same rounds: a probe
                        every 50 steps, gradient norms every 5
probe_extra_mb          how far a probe's peak resident memory lies above that of a step, in a process of its own
probe_growth_exponent   slope of ln seconds against ln context length over 256 to 2048, for the same number of rows
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from figures import report, status_mb
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from attnlimits.attention import attach
from attnlimits.callbacks import AttentionProbe
from attnlimits.callbacks.gradient_norms import gradient_norm, parameter_groups
from attnlimits.metrics.likelihood import token_nll

SETTINGS = yaml.safe_load((Path(__file__).parents[1] / "conf" / "callbacks" / "default.yaml").read_text())
LENGTHS = (256, 512, 1024, 2048)


class Subject:
    """The model in training, and what is done with it."""

    def __init__(self, context_length: int) -> None:
        torch.manual_seed(0)
        self.backbone = GPT2LMHeadModel(GPT2Config(n_positions=max(LENGTHS))).train()
        attach(self.backbone, {"name": "softmax"}, T=1.0, context_length=context_length)
        self.tokens = torch.randint(50257, (1, context_length + 1), generator=torch.Generator().manual_seed(0))
        self.optimizer = torch.optim.AdamW(self.backbone.parameters(), lr=1e-5)
        self.groups = parameter_groups(self.backbone)
        options = {key: value for key, value in SETTINGS["attention_probe"].items() if key != "_target_"}
        self.callback = AttentionProbe(**options)

    def backward(self) -> None:
        logits = self.backbone(input_ids=self.tokens[:, :-1], use_cache=False).logits
        token_nll(logits, self.tokens[:, 1:]).mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def probe(self) -> dict[str, Tensor]:
        subject: Any = self
        return self.callback.measure(subject, self.tokens)

    def gradient_norms(self) -> None:
        for parameters in self.groups.values():
            gradient_norm(parameters)


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cost(rounds: int) -> dict[str, float]:
    subject = Subject(1024)
    rows = []
    for _ in range(rounds + 1):
        step, probe = seconds(subject.step), seconds(subject.probe)
        subject.backward()
        rows.append((step, probe, seconds(subject.gradient_norms)))
        subject.optimizer.zero_grad()
    per_probe = SETTINGS["attention_probe"]["every_n_steps"]
    per_norms = SETTINGS["gradient_norms"]["every_n_steps"]
    slowdowns = [1 + (probe / per_probe + norms / per_norms) / step for step, probe, norms in rows[1:]]
    return {
        "step_seconds": statistics.median(step for step, _, _ in rows[1:]),
        "probe_vs_step": statistics.median(probe / step for step, probe, _ in rows[1:]),
        "training_slowdown": statistics.median(slowdowns),
    }


def growth(rounds: int) -> dict[str, float]:
    """Lengths take turns, so that a slow minute of the machine meets all of them."""
    subjects = {length: Subject(length) for length in LENGTHS}
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(rounds + 1):
        for length, subject in subjects.items():
            times[length].append(seconds(subject.probe))
    medians = {length: statistics.median(found[1:]) for length, found in times.items()}
    x, y = [math.log(length) for length in LENGTHS], [math.log(medians[length]) for length in LENGTHS]
    return {
        **{f"probe_seconds_{length}": medians[length] for length in LENGTHS},
        "probe_growth_exponent": statistics.linear_regression(x, y).slope,
    }


def print_extra_mb() -> None:
    subject = Subject(1024)
    for _ in range(2):
        subject.step()
    after_step = status_mb("VmHWM")
    subject.probe()
    print(status_mb("VmHWM") - after_step)


def extra_mb() -> float:
    command = [sys.executable, __file__, "--extra-mb"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the probe costs while GPT-2 124M trains.")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--extra-mb", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.extra_mb:
        return print_extra_mb()
    figures = {"probe_extra_mb": extra_mb()} | cost(arguments.rounds) | growth(max(1, arguments.rounds // 2))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
