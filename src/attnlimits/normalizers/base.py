"""The contract that every attention normalizer keeps, and the registry that finds it by name."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Properties:
    """What a normalizer declares of itself, at T = 1; tests hold it to that, and docs/normalizers.md is made of it.

    Attributes:
        formula: of one weight, z the row's logits over T.
        source: where it was proposed.
        row_sum: of a row with a visible key: "one", "at most one" or "free".
        shift_invariant: adding a constant to the visible logits changes nothing.
        sparse: visible keys may get exactly 0.
        length_aware: the map depends on how many keys the row sees.
        jacobian_bound: of the largest singular value of dp/dz, as a formula; "none" where it is unbounded.
        near_softmax: with its default options, rows of noise get less than a tenth of their weight elsewhere than under
            softmax, so that a checkpoint of softmax starts close to itself.
    """

    formula: str
    source: str
    row_sum: Literal["one", "at most one", "free"]
    shift_invariant: bool
    sparse: bool
    length_aware: bool
    jacobian_bound: str
    near_softmax: bool


@dataclass(frozen=True)
class JacobianForm:
    """The Jacobian of a row in the logits over T: dp/dz = factor (diag u - u u^T / total).

    Attributes:
        u: (..., Q, K), >= 0.
        total: (..., Q) or a number, at least the sum of u; inf for an elementwise map.
        factor: (..., Q) or a number.
    """

    u: Tensor
    total: Tensor | float
    factor: Tensor | float = 1.0


REGISTRY: dict[str, type[Normalizer]] = {}


class Normalizer(nn.Module, abc.ABC):
    """Turn one row of attention logits into attention weights, ``weights = N(logits / T)``.

    A subclass names itself (``class SSMax(Normalizer, name="ssmax")``) and implements :meth:`normalize`; its
    constructor's own keyword arguments, beside the three below, are the keys of its YAML file.

    Args:
        T: temperature, finite and > 0. 1 leaves the logits as the model computes them.
        n_heads: heads of the layer, for parameters that are per head.
        context_length: longest training row, for initial values that depend on it.

    Attributes:
        properties: what the normalizer declares of itself.
        rescales_rows: the map is softmax of rows multiplied by :meth:`row_scale`, so that
            scaled_dot_product_attention can compute it without an explicit Q x K tensor.
    """

    name: ClassVar[str]
    properties: ClassVar[Properties]
    rescales_rows: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name in REGISTRY:
            raise ValueError(f"two normalizers are named {name!r}: {REGISTRY[name]} and {cls}")
        cls.name = name
        REGISTRY[name] = cls

    def __init__(self, *, T: float = 1.0, n_heads: int = 1, context_length: int = 1024) -> None:
        super().__init__()
        if not 0 < T < float("inf"):
            raise ValueError(f"T={T}: must be finite and > 0")
        self.T = float(T)
        self.n_heads = n_heads
        self.context_length = context_length

    def forward(self, logits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Weights of every row.

        Args:
            logits: (..., H, Q, K), any float dtype. Arithmetic is in float32, or float64 where that comes in.
            mask: bool, broadcastable to ``logits``, True = visible; None = every key is visible.

        Returns:
            (..., H, Q, K) in the dtype of ``logits``; 0 at masked keys, and 0 with gradient 0 in a fully masked row.
        """
        logits_fp = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.T != 1:  # a pass over memory less where it changes nothing
            logits_fp = logits_fp / self.T
        return self.normalize(logits_fp, mask).to(logits.dtype)

    @abc.abstractmethod
    def normalize(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """The map itself, on float32 or float64 logits that are already divided by T."""

    def row_scale(self, n_visible: Tensor) -> Tensor | None:
        """The factor by which :attr:`rescales_rows` multiplies a row of ``n_visible`` keys; None = 1.

        Args:
            n_visible: (..., 1, Q), the number of visible keys of each query row.

        Returns:
            (..., H, Q), or None.
        """
        return None

    def jacobian_form(self, weights: Tensor, mask: Tensor) -> JacobianForm | None:
        """The Jacobian at these weights if it is a diagonal minus a rank-one matrix, else None.

        Args:
            weights: (..., H, Q, K), of this normalizer.
            mask: bool, (..., Q, K), True = visible.
        """
        if not self.rescales_rows:
            return None
        scale = self.row_scale(mask.sum(-1))
        return JacobianForm(weights, 1.0, 1.0 if scale is None else scale)

    def learned(self) -> dict[str, Tensor]:
        """The trained parameters by name, (H,) each, as they act on the weights."""
        trained = ((name, p) for name, p in self.named_parameters(recurse=False) if p.requires_grad)
        return {name.removesuffix("_H"): p.detach() for name, p in trained}

    def extra_repr(self) -> str:
        return f"T={self.T}"


def masked_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the visible keys; 0 at masked keys and in fully masked rows, gradients included."""
    if mask is None:
        return torch.softmax(logits, dim=-1)
    # A finite fill: with -inf a fully masked row would be NaN, forward and backward.
    filled = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    return zero_masked(torch.softmax(filled, dim=-1), mask)


def zero_masked(weights: Tensor, mask: Tensor | None) -> Tensor:
    """The weights, 0 at masked keys."""
    return weights if mask is None else weights.masked_fill(~mask, 0.0)


def visible_keys(logits: Tensor, mask: Tensor | None) -> Tensor:
    """How many keys each row sees, (..., 1 or H, Q): the mask's count, never the tensor's width under a mask."""
    if mask is None:
        return torch.full(logits.shape[-2:-1], logits.shape[-1], device=logits.device)
    return mask.expand(*mask.shape[:-1], logits.shape[-1]).sum(-1)
