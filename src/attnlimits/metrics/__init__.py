"""Metrics: pure functions of tensors, and torchmetrics wrappers where accumulation over batches or ranks matters."""

from .likelihood import TokenLikelihood

__all__ = ["TokenLikelihood"]
