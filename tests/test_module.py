"""The LightningModule's arithmetic: which parameters decay, how the rate moves, what perplexity means."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlimits import backbone
from attnlimits.metrics import TokenLikelihood
from attnlimits.metrics.likelihood import perplexity, token_nll
from attnlimits.module import parameter_groups, warmup_cosine


def test_norms_biases_and_normalizer_parameters_do_not_decay(compose_train: Callable, tiny_model: Path) -> None:
    cfg = compose_train([f"model.path={tiny_model}", "context_length=32", "normalizer=ssmax"])
    model, _ = backbone.build(cfg, corpus=[])
    decayed, spared = (group["params"] for group in parameter_groups(model, 0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in spared:
        assert names[id(parameter)].split(".")[-1] in {"bias", "s_H"} or "ln_" in names[id(parameter)]
    for parameter in decayed:
        assert names[id(parameter)].endswith("weight")
        assert "ln_" not in names[id(parameter)]
    assert len(decayed) + len(spared) == len(names)


def test_learning_rate_warms_up_then_falls_on_a_cosine() -> None:
    factor = warmup_cosine(warmup=4, n_steps=24, final=0.1)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(14) == pytest.approx(0.55)
    assert factor(24) == factor(1000) == pytest.approx(0.1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 5))
def test_perplexity_does_not_depend_on_the_batches(sizes: list[int], seed: int) -> None:
    nll = torch.rand(sum(sizes), 7, generator=torch.Generator().manual_seed(seed)) * 9
    whole, split = TokenLikelihood(), TokenLikelihood()
    whole.update(nll)
    for part in nll.split(sizes):
        split.update(part)
    assert split.compute().item() == pytest.approx(whole.compute().item(), rel=1e-12)
    assert whole.compute().item() == pytest.approx(math.fsum(nll.double().flatten().tolist()) / nll.numel(), rel=1e-12)


def test_nll_is_the_definition() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 4, 2], [1, 1, 3]])
    for b in range(2):
        for t in range(3):
            total = sum(math.exp(z) for z in logits[b, t].tolist())
            expected = -math.log(math.exp(logits[b, t, targets[b, t]].item()) / total)
            assert token_nll(logits, targets)[b, t].item() == pytest.approx(expected, rel=1e-12)


def test_perplexity_overflows_to_inf() -> None:
    assert perplexity(710.0) == math.inf
    assert perplexity(math.log(2)) == pytest.approx(2)
