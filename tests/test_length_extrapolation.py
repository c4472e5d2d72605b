"""The loss at other context lengths is that of plain blocks of those lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch

from attnlimits.callbacks.length_extrapolation import LengthExtrapolation, context_lengths, losses
from attnlimits.metrics.likelihood import token_nll


def test_lengths_are_half_the_trained_one_and_its_doubles() -> None:
    assert context_lengths(32, 128) == [16, 32, 64, 128]
    assert context_lengths(24, 64) == [12, 24, 48]
    assert context_lengths(64, 64) == [32, 64]


@pytest.fixture
def trained(run: Callable[..., Any]) -> Any:
    return run("context_length=16")


def test_a_run_writes_the_loss_of_plain_blocks(trained: Any) -> None:
    table = pd.read_csv(trained.directory / "extrapolation.csv")
    assert table["length"].unique().tolist() == [8, 16, 32, 64]  # the tiny model has 64 positions
    # Every length predicts the same tokens, each once.
    assert table.groupby("length")["tokens"].sum().nunique() == 1
    metrics = pd.read_csv(trained.directory / "metrics.csv")
    for length, loss in losses(table).items():
        assert metrics[f"extrapolation/loss_n{length}"].dropna().item() == pytest.approx(loss)
    last = table[table["length"] == 64]
    assert last["first_position"].tolist() == [0, 16, 32]
    assert last["last_position"].tolist() == [15, 31, 63]


def test_measured_is_what_the_model_computes(trained: Any) -> None:
    module, blocks = trained.module, trained.module.trainer.datamodule.validation
    table = LengthExtrapolation(tokens=128).measure(module, blocks)
    stream = blocks.stream(128)
    assert (
        stream.tolist() == torch.cat([blocks.batch([0])[0], *(blocks.batch([i])[0, 1:] for i in range(1, 8))]).tolist()
    )
    module.eval()
    with torch.no_grad():
        for length in (8, 64):
            parts = [stream[start : start + length + 1][None] for start in range(0, 128, length)]
            nll = torch.cat([token_nll(module.backbone(p[:, :-1]).logits, p[:, 1:]) for p in parts]).double()
            assert losses(table)[length] == pytest.approx(nll.mean().item(), rel=1e-6)
            early = table[(table["length"] == length) & (table["first_position"] == 0)]["loss"].item()
            assert early == pytest.approx(nll[:, :16].mean().item(), rel=1e-6)


def test_nothing_of_the_run_changes(run: Callable[..., Any]) -> None:
    with_it = run("context_length=16", directory="with").module.state_dict()
    without = run("context_length=16", "~callbacks.length_extrapolation", directory="without").module.state_dict()
    assert all(torch.equal(with_it[key], without[key]) for key in with_it)
