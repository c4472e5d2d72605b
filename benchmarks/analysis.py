"""What analyze.py's five experiments cost on a random-init GPT-2 of 124M shape, against a straightforward version.

    python benchmarks/analysis.py --json analysis.json

One passage of 1024 random tokens, all 144 heads, every row, the default grids; Linux only. Figures:

five_experiments_seconds   wall time of attnlimits.analysis.analyze, bounds and audit included (median over rounds)
peak_gb                    peak resident memory of a process that makes the model and analyses it
vs_straightforward         how many times faster a head is than by hooks and a loop over N and L without shared work,
                           in float32, on HEADS heads; both take turns
agreement                  the largest relative difference between the two versions' means over rows
length_growth_exponent     slope of ln seconds against ln L over 256 to 2048, on one layer of 12 heads
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from figures import report, status_mb
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from attnlimits.analysis import Settings, analyze

FIVE = ("distance_vs_length", "distance_vs_topn", "critical_topn", "separability", "gradient_sensitivity")
SETTINGS = Settings(experiments=FIVE)
LENGTH, LAYERS = 1024, 12
LENGTHS = (256, 512, 1024, 2048)
HEADS = 1
CHUNK = 64  # rows whose (rows, keys, d) differences the straightforward version holds at once

Found = dict[tuple[str, str, int, int | None], float]  # mean over rows by experiment, quantity, L, N


def subject(n_layer: int | None = None, n_positions: int = 1024) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=n_layer or LAYERS, n_positions=n_positions)).eval()


def tokens(length: int) -> Tensor:
    return torch.randint(50257, (1, length), generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------ the straightforward way


def straightforward(model: GPT2LMHeadModel, ids: Tensor, n_heads: int) -> Found:
    """The first heads of the first layer: a forward pass a length with hooks, then every experiment by itself."""
    found: Found = {}
    for L in SETTINGS.lengths_within(ids.shape[1]):
        weights, x, logits = _hooked(model, ids[:, :L], n_heads)
        for head in range(n_heads):
            _distances(found, weights[head], x[head], "distance_vs_length", L, [SETTINGS.length_n])
            _distances(found, weights[head], x[head], "critical_topn", L, SETTINGS.critical_n)
            if ids.shape[1] == L:
                _distances(found, weights[head], x[head], "distance_vs_topn", L, SETTINGS.top_n)
                _separabilities(found, weights[head], x[head], L)
                _sensitivities(found, logits[head], L)
    return found


def _hooked(model: GPT2LMHeadModel, ids: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    packed: list[Tensor] = []
    first: Any = model.transformer.h[0]
    hook = first.attn.c_attn.register_forward_hook(lambda module, args, out: packed.append(out[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    q, k, v = (part.view(len(part), 12, 64).transpose(0, 1)[:n_heads] for part in packed[0].split(768, dim=-1))
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    logits = (q @ k.transpose(-1, -2) / 8).masked_fill(~causal, -torch.inf)
    return torch.softmax(logits, dim=-1), v, logits


def _row_chunks(weights: Tensor, N: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(weights, visible, in the top N, n) of chunks of the rows that see more than N keys."""
    for rows in torch.arange(N, len(weights)).split(CHUNK):
        a, n = weights[rows], rows + 1
        visible = torch.arange(weights.shape[1]) < n[:, None]
        inside = torch.zeros_like(visible).scatter_(-1, a.topk(N, dim=-1).indices, True)
        yield a, visible, inside, n


def _distances(found: Found, weights: Tensor, x: Tensor, experiment: str, L: int, sizes: Sequence[int]) -> None:
    for N in sizes:
        if N >= L:
            continue
        d, bound, expected = [], [], []
        for a, visible, inside, n in _row_chunks(weights, N):
            outside = visible & ~inside
            y = a[..., None] * x
            s = (a * inside) @ x
            d.append(((y - s[:, None]).norm(dim=-1) * outside).sum(-1))
            c = N / (n - 1)
            mean = (1 + c)[:, None, None] * y - (c[:, None] * y.sum(1))[:, None]
            expected.append((n - N) / n * (mean.norm(dim=-1) * visible).sum(-1))
            if experiment != "critical_topn":
                bound.append(_published(a, x, inside, outside, n, N))
        found[(experiment, "distance", L, N)] = torch.cat(d).mean().item()
        found[(experiment, "expected_distance_lower", L, N)] = torch.cat(expected).mean().item()
        if bound:
            found[(experiment, "distance_published", L, N)] = torch.cat(bound).mean().item()


def _published(a: Tensor, x: Tensor, inside: Tensor, outside: Tensor, n: Tensor, N: int) -> Tensor:
    pairs = torch.cdist(x, x)
    widest = torch.stack([pairs[o][:, i].max() for o, i in zip(outside, inside, strict=True)])
    mass, longest = (a * inside).sum(-1), (x.norm(dim=-1) * inside).amax(-1)
    return (1 - mass) * widest + longest * ((n - N) * mass - (1 - mass))


def _separabilities(found: Found, weights: Tensor, x: Tensor, L: int) -> None:
    u = x / x.norm(dim=-1, keepdim=True)
    for N in [N for N in SETTINGS.separability_n if N < L]:
        ratios, uppers = [], []
        for a, visible, inside, n in _row_chunks(weights, N):
            distances = (a[..., None] * u - ((a * inside) @ u)[:, None]).norm(dim=-1)
            r = distances.masked_fill(~visible | inside, torch.inf).amin(-1)
            ratios.append(((distances < r[:, None]) & inside).sum(-1) / N)
            uppers.append(_theorem_2(a, u, inside, r, n, N))
        found[("separability", "separability", L, N)] = torch.cat(ratios).mean().item()
        found[("separability", "separability_published_upper", L, N)] = torch.cat(uppers).mean().item()


def _theorem_2(a: Tensor, u: Tensor, inside: Tensor, r: Tensor, n: Tensor, N: int) -> Tensor:
    pairs = torch.cdist(u, u) + 4 * torch.eye(len(u))
    delta = torch.stack([pairs[:m, :m].min() for m in n.tolist()])
    top = a[inside].view(len(a), N)
    squares = top.square().sum(-1, keepdim=True) - top.square()
    products = ((top.sum(-1, keepdim=True) - top).square() - squares).clamp(min=0)
    xi = (squares + (1 - delta[:, None].square() / 2) * products).clamp(min=0).sqrt()
    return torch.exp(-(xi - r[:, None]).clamp(min=0).square() / 2).mean(-1)


def _sensitivities(found: Found, logits: Tensor, L: int) -> None:
    v = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).tril()
    v = v / v.norm(dim=-1, keepdim=True)
    for T in SETTINGS.temperatures:
        for eps in SETTINGS.steps:
            moved = torch.softmax((logits + eps * v) / T, -1) - torch.softmax(logits / T, -1)
            found[("gradient_sensitivity", f"T={T} eps={eps}", L, None)] = (moved.norm(dim=-1) / eps).mean().item()


# ------------------------------------------------------------------------------------------------------ measuring


def seconds_and_result(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def cost(rounds: int) -> dict[str, float]:
    model, ids = subject(), tokens(LENGTH)
    ours, theirs, ratios = [], [], []
    for _ in range(rounds):
        fast, analysis = seconds_and_result(lambda: analyze(model, ids, SETTINGS))
        slow, naive = seconds_and_result(lambda: straightforward(model, ids, HEADS))
        ours.append(fast)
        theirs.append(slow / HEADS)
        ratios.append((slow / HEADS) / (fast / (12 * model.config.n_layer)))
    return {
        "five_experiments_seconds": statistics.median(ours),
        "straightforward_seconds_a_head": statistics.median(theirs),
        "vs_straightforward": statistics.median(ratios),
        "agreement": agreement(analysis.results, naive),
    }


def agreement(results: pd.DataFrame, naive: Found) -> float:
    """Of what does not depend on random directions; head 0 alone, as HEADS is 1."""
    part = results[(results["layer"] == 0) & (results["head"] == 0)].dropna(subset=["N"])
    ours = part.set_index(["experiment", "quantity", "L", "N"])["value"]
    return max(abs(ours[key] / value - 1) for key, value in naive.items() if key[3] is not None)


def growth(rounds: int) -> dict[str, float]:
    model = subject(n_layer=1, n_positions=max(LENGTHS))
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(rounds + 1):
        for length in LENGTHS:
            work = functools.partial(analyze, model, tokens(length), SETTINGS)
            times[length].append(seconds_and_result(work)[0])
    medians = {length: statistics.median(found[1:]) for length, found in times.items()}
    x, y = [math.log(length) for length in LENGTHS], [math.log(value) for value in medians.values()]
    slope = statistics.linear_regression(x, y).slope
    return {f"layer_seconds_{L}": value for L, value in medians.items()} | {"length_growth_exponent": slope}


def print_peak_gb() -> None:
    analyze(subject(), tokens(LENGTH), SETTINGS)
    print(status_mb("VmHWM") / 1024)


def peak_gb() -> float:
    command = [sys.executable, __file__, "--peak"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="The five experiments on a GPT-2 of 124M shape.")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        return print_peak_gb()
    report(cost(arguments.rounds) | {"peak_gb": peak_gb()} | growth(arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
