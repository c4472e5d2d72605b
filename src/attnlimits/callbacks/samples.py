"""How the model goes on with a fixed prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedTokenizerBase

from ..loggers import run_directory
from ..probe import evaluating


class Samples(Callback):
    """Greedy continuation of a prompt at every validation: to samples.jsonl in the run directory, and to W&B.

    Greedy, so that two steps differ by the model and nothing random is drawn.

    Args:
        prompt: text to go on with.
        new_tokens: how many tokens to add.
    """

    def __init__(self, *, prompt: str = "The first thing to notice is", new_tokens: int = 32) -> None:
        if not prompt or new_tokens < 1:
            raise ValueError(f"prompt={prompt!r} new_tokens={new_tokens}: a text, and at least 1")
        self.prompt, self.new_tokens = prompt, new_tokens
        self.tokenizer: PreTrainedTokenizerBase | None = None  # given by training.py

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        text = self.continuation(pl_module)
        directory, step = run_directory(trainer.loggers), trainer.global_step
        _append(directory / "samples.jsonl", step, text)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_text("samples", columns=["step", "text"], data=[[str(step), text]], step=step)

    def continuation(self, pl_module: LightningModule) -> str:
        """The prompt with what the model adds."""
        assert self.tokenizer is not None
        model: Any = pl_module.backbone
        ids = torch.tensor([self.tokenizer.encode(self.prompt)], device=pl_module.device)
        room = model.config.max_position_embeddings - ids.shape[1]
        with evaluating(model):
            grown = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=min(self.new_tokens, room),
                pad_token_id=0,
            )
        return str(self.tokenizer.decode(grown[0]))


def _append(path: Path, step: int, text: str) -> None:
    """A step that is there already, as after a resumed run, is written anew."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in lines if json.loads(line)["step"] < step]
    kept.append(json.dumps({"step": step, "text": text}, ensure_ascii=False))
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
