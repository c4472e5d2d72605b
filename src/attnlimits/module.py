"""The one LightningModule: next-token loss, perplexity, optimizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from .backbone import BACKBONE_CONFIG
from .metrics.likelihood import TokenLikelihood, perplexity, token_nll
from .normalizers import Normalizer


class LanguageModel(LightningModule):
    """Fine-tunes a decoder on blocks of token ids.

    Logged, with x = optimizer steps done:

    =========================  ==========================================================================
    train/loss                 nats a token, over all micro-batches of the step
    train/lr                   learning rate of the step
    val/loss                   nats a token over the validation blocks, before the first step too
    val/perplexity             exp(val/loss)
    val/bits_per_character     val/loss / ln 2 / characters a token of the validation text
    =========================  ==========================================================================

    Args:
        backbone: a decoder with a normalizer attached.
        optimizer: the section of that name in conf/train.yaml, as plain types.
        n_steps: length of the learning rate schedule.
        characters_per_token: of the validation text.
    """

    def __init__(
        self, backbone: PreTrainedModel, optimizer: dict[str, Any], n_steps: int, characters_per_token: float
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        # from_pretrained returns an eval-mode model, and Lightning trains in the mode it finds.
        self.backbone = backbone.train()
        self.train_nll = TokenLikelihood()
        self.val_nll = TokenLikelihood()

    def nll(self, tokens_BxL1: Tensor) -> Tensor:
        """Of every token but the first of each block, (B, L)."""
        logits = self.backbone(input_ids=tokens_BxL1[:, :-1], use_cache=False).logits
        return token_nll(logits, tokens_BxL1[:, 1:])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        nll = self.nll(batch)
        self.train_nll.update(nll)
        return nll.mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Once an optimizer step, however many micro-batches it accumulated."""
        values = {"train/loss": self.train_nll.compute(), "train/lr": optimizer.param_groups[0]["lr"]}
        self.train_nll.reset()
        self.log_dict({**values, "step": float(self.trainer.global_step + 1)})

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_nll.update(self.nll(batch))

    def on_validation_epoch_end(self) -> None:
        loss = self.val_nll.compute().item()
        self.val_nll.reset()
        bits = loss / math.log(2) / self.hparams["characters_per_token"]
        values = {"val/loss": loss, "val/perplexity": perplexity(loss), "val/bits_per_character": bits}
        self.log_dict({**values, "step": float(self.trainer.global_step)})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The model's shape and normalizer, as plain types, so that no source is needed to build it again."""
        checkpoint[BACKBONE_CONFIG] = json.loads(self.backbone.config.to_json_string(use_diff=False))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        options = self.hparams["optimizer"]
        optimizer = AdamW(
            parameter_groups(self.backbone, options["weight_decay"]), lr=options["lr"], betas=tuple(options["betas"])
        )
        schedule = warmup_cosine(options["warmup_steps"], self.hparams["n_steps"], options["final_lr_fraction"])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, schedule), "interval": "step"},
        }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings decay; norms, biases and normalizer parameters do not."""
    spared = {id(p) for module in model.modules() if isinstance(module, Normalizer) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in spared]
    decayed_ids = {id(p) for p in decayed}
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) not in decayed_ids], "weight_decay": 0.0},
    ]


def warmup_cosine(warmup: int, n_steps: int, final: float) -> Callable[[int], float]:
    """Factor of the peak learning rate by step: linear up to 1, then a cosine down to ``final`` at ``n_steps``."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, n_steps - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
