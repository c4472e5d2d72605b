"""The size of the gradients that an optimizer step is made of."""

from __future__ import annotations

import re

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ..attention import attention_layers
from ..loggers import log_scalars
from ..normalizers import Normalizer


class GradientNorms(Callback):
    """L2 norms once an optimizer step: of the accumulated, reduced and unscaled gradient, not of a micro-batch.

    ``gradients/norm`` and ``gradients/<kind>`` and ``gradients/layer_07`` are taken before clipping,
    ``gradients/norm_clipped`` after it: a run whose norm lies above the clip value is clipped, not broken.

    Args:
        every_n_steps: optimizer steps between measurements.
    """

    def __init__(self, *, every_n_steps: int = 5) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1")
        self.every_n_steps = every_n_steps
        self._groups: dict[str, list[nn.Parameter]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._groups = parameter_groups(pl_module.backbone)  # type: ignore[arg-type]

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Called after the backward pass of the last micro-batch, unscaled, before Lightning clips."""
        step = trainer.global_step + 1
        if step % self.every_n_steps:
            return
        norms = {f"gradients/{name}": gradient_norm(parameters) for name, parameters in self._groups.items()}
        clip = trainer.gradient_clip_val
        norms["gradients/norm_clipped"] = min(norms["gradients/norm"], clip) if clip else norms["gradients/norm"]
        if trainer.is_global_zero:
            log_scalars(trainer.loggers, norms, step)


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """``norm`` (all), every kind that has parameters, and every layer, by the names under which they are logged."""
    groups: dict[str, list[nn.Parameter]] = {"norm": [p for p in model.parameters() if p.requires_grad]}
    kinds = _kinds(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        groups.setdefault(kinds[name], []).append(parameter)
        if layer := re.search(r"\.(?:h|layers)\.(\d+)\.", f".{name}"):
            groups.setdefault(f"layer_{int(layer[1]):02d}", []).append(parameter)
    return groups


def _kinds(model: nn.Module) -> dict[str, str]:
    """The kind of every parameter: by the module it belongs to, not by its spelling alone."""
    attention = {name for name, _ in attention_layers(model)}
    normalizers = {name for name, module in model.named_modules() if isinstance(module, Normalizer)}
    embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}

    def kind(name: str) -> str:
        owners = {name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)}
        for label, modules in (("normalizer", normalizers), ("attention", attention), ("embeddings", embeddings)):
            if owners & modules:
                return label
        return "mlp" if ".mlp." in f".{name}" else "other"

    return {name: kind(name) for name, _ in model.named_parameters()}


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    """L2 norm over all of them, in float64 across tensors; 0 where there is no gradient."""
    norms: list[Tensor] = [p.grad.detach().norm().double() for p in parameters if p.grad is not None]
    return torch.stack(norms).norm().item() if norms else 0.0
