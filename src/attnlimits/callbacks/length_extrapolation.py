"""What a longer or shorter context than the trained one does to the loss."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from ..data import Blocks
from ..loggers import log_scalars, run_directory
from ..metrics.likelihood import perplexity
from ..module import LanguageModel
from ..probe import evaluating


class LengthExtrapolation(Callback):
    """When training ends: the validation loss at 0.5x, 1x, 2x, 4x ... the trained context, up to the model's positions.

    All lengths predict the same tokens of the validation text's beginning. Scalars ``extrapolation/loss_n512`` and
    ``extrapolation/perplexity_n512`` go to every logger; the same by position to extrapolation.csv beside metrics.csv.

    Args:
        tokens: how many tokens each length predicts, rounded down to whole blocks of the longest.
    """

    def __init__(self, *, tokens: int = 8192) -> None:
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: must be at least 1")
        self.tokens = tokens

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        table = self.measure(pl_module, trainer.datamodule.validation)  # type: ignore[attr-defined]
        table.to_csv(run_directory(trainer.loggers) / "extrapolation.csv", index=False)
        scalars = {}
        for length, loss in losses(table).items():
            scalars[f"extrapolation/loss_n{length}"] = loss
            scalars[f"extrapolation/perplexity_n{length}"] = perplexity(loss)
        log_scalars(trainer.loggers, scalars, trainer.global_step)

    def measure(self, pl_module: LanguageModel, blocks: Blocks) -> pd.DataFrame:
        """A row a length and range of positions: length, first_position, last_position, tokens, loss, perplexity."""
        positions = pl_module.backbone.config.max_position_embeddings
        available = len(blocks) * blocks.context_length
        lengths = context_lengths(blocks.context_length, min(positions, available))
        # Whole blocks of the longest, which are whole blocks of all.
        whole = max(lengths) * max(1, min(self.tokens, available) // max(lengths))
        stream = blocks.stream(whole)
        with evaluating(pl_module), torch.no_grad():
            tables = [_by_position(pl_module, stream, length) for length in lengths]
        return pd.concat(tables, ignore_index=True)


def context_lengths(trained: int, longest: int) -> list[int]:
    """Half the trained length, the length itself, and its doubles up to ``longest``."""
    lengths = [trained // 2] if trained >= 2 else []
    while trained <= longest:
        lengths.append(trained)
        trained *= 2
    return lengths


def losses(table: pd.DataFrame) -> dict[int, float]:
    """Nats a token by context length, over all positions."""
    weighted = table.assign(nats=table["loss"] * table["tokens"]).groupby("length")[["nats", "tokens"]].sum()
    return (weighted["nats"] / weighted["tokens"]).to_dict()


def _by_position(module: LanguageModel, stream: Tensor, length: int) -> pd.DataFrame:
    n_blocks = (len(stream) - 1) // length
    starts = torch.arange(n_blocks)[:, None] * length
    blocks = stream[starts + torch.arange(length + 1)]
    # One block after the other: a long one is as much as fits where a training batch did.
    nll = torch.cat([module.nll(block[None].to(module.device)).double().cpu() for block in blocks])
    records = []
    for first, end in _ranges(length):
        loss = nll[:, first:end].mean().item()
        places = {"length": length, "first_position": first, "last_position": end - 1}
        records.append(places | {"tokens": n_blocks * (end - first), "loss": loss, "perplexity": perplexity(loss)})
    return pd.DataFrame(records)


def _ranges(length: int) -> list[tuple[int, int]]:
    """Positions 0 .. 15, 16 .. 31, 32 .. 63, ...: each as long as all before it."""
    edges = [0, 16]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return [(first, min(end, length)) for first, end in pairwise(edges) if first < length]
