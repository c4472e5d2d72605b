"""Newton's method for the threshold of alpha-entmax: in eager chunks of rows, or fused by torch.compile.

With y = (alpha - 1)(z - max z), q = 1/(alpha - 1) and r = (y - tau)_+ the weights are r^q for the tau at which they sum
to 1, that is ||r||_q = 1. The norm is convex in tau and falls, so that from tau = -1, where max r = 1, Newton's method
rises monotonically and never passes the root. No sort; a pass reads the row once.

Both ways run the same passes. Neither trusts their number: rows get more of them until their weights sum to 1
within rounding or tau no longer moves, and what rounding leaves is divided out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MODES = ("auto", "on", "off")
EAGER_CHUNK = 2**18  # elements: every pass of a chunk finds its float32 rows in a core's own cache
FUSED_CHUNK = 2**21  # larger, for there are fewer passes over memory and a call costs more
WORTH_COMPILING = 2**16  # elements below which auto stays eager: single rows of a generation, small tests
VARIANTS = 64  # of a compiled kernel (alphas, dtypes, a dimension of size 1); lengths share one

_log = logging.getLogger(__name__)
_state: dict[str, Any] = {"mode": "off", "said": False}


def set_compile(mode: str) -> None:
    """How every later call in this process solves: ``off`` eagerly; ``on`` compiled, or an error where that fails;
    ``auto`` compiled for large inputs, and eagerly where compilation fails. Which one runs is logged once.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"compile={mode}: must be one of {', '.join(MODES)}")
    _state.update(mode=mode, said=False)
    _log.disabled = False  # Hydra disables every logger that exists when a job starts


def solve(logits: Tensor, alpha: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """alpha-entmax of every row, without gradient; masked keys, and rows that have no others, get 0.

    Args:
        logits: (..., K), float32 or float64.
        alpha: in (1, 2], a number, or a tensor that broadcasts to (..., 1).
        mask: bool, broadcastable to ``logits``, True = visible.
    """
    if not logits.numel():
        return torch.zeros_like(logits)
    rows_NxK = logits.reshape(-1, logits.shape[-1])
    if isinstance(alpha, Tensor):
        alpha = alpha.expand(*logits.shape[:-1], 1).reshape(-1, 1)
    mask_NxK = None if mask is None else mask.expand_as(logits).reshape(rows_NxK.shape)
    return _run(_solve_compiled, _solve_eager, rows_NxK, alpha, mask_NxK).view(logits.shape)


def pull_back(weights: Tensor, grad: Tensor, alpha: float) -> Tensor:
    """J grad of every row, (..., K), by the way that :func:`solve` takes; without second derivative."""
    rows = weights.reshape(-1, weights.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return _run(_pull_back_compiled, _pull_back_eager, *rows, alpha).view(weights.shape)


def project(u: Tensor, grad: Tensor) -> Tensor:
    """J grad with J = diag(u) - u u^T / sum u, of alpha-entmax where u is :func:`metric`."""
    pulled = u * grad
    mean = pulled.sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    return torch.addcmul(pulled, u, mean, value=-1)


def metric(weights: Tensor, alpha: float | Tensor) -> Tensor:
    """u = p^(2 - alpha) on the support, 0 off it."""
    if isinstance(alpha, float) and alpha in (1.5, 2.0):
        return weights.sqrt() if alpha == 1.5 else weights.sign()
    return torch.where(weights > 0, torch.where(weights > 0, weights, 1.0) ** (2 - alpha), 0.0)


def newton_pass(y: Tensor, tau: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One pass.

    Returns:
        The weights at tau before division, their sum, the next tau, and which rows are still open: their sum is above 1
        by more than rounding explains, and tau moves.
    """
    r = (y - tau).clamp_(min=0)
    powers, slope = _powers_and_slope(r, alpha)
    total = powers.sum(-1, keepdim=True)
    # (||r||_q - 1) ||r||_q^(q-1) / sum r^(q-1), with ||r||_q = total^(1/q)
    norm = _power(total, alpha - 1)
    step = (norm - 1) * _power(total, 2 - alpha) / slope.clamp(min=torch.finfo(y.dtype).tiny)
    moved = torch.maximum(tau, tau + step)  # rounding must not let tau fall: it could then alternate for ever
    open_rows = (total > 1 + 8 * torch.finfo(y.dtype).eps) & (moved > tau)
    return powers, total, moved, open_rows


def _powers_and_slope(r: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """r^q, and the row's sum of r^(q - 1) over r > 0."""
    if isinstance(alpha, float) and alpha == 2.0:
        positive = torch.gt(r, 0, out=torch.empty_like(r))  # as numbers: to sum booleans is ten times slower
        return r, positive.sum(-1, keepdim=True)
    if isinstance(alpha, float) and alpha == 1.5:
        return r * r, r.sum(-1, keepdim=True)
    lower = torch.where(r > 0, r ** (1 / (alpha - 1) - 1), 0.0)
    return lower * r, lower.sum(-1, keepdim=True)


def _power(base: Tensor, exponent: float | Tensor) -> Tensor:
    """``base ** exponent``, by the cheap routes that torch does not take."""
    if isinstance(exponent, float) and exponent in (0.0, 0.5, 1.0):
        return torch.ones_like(base) if exponent == 0.0 else base.sqrt() if exponent == 0.5 else base
    return base**exponent


def _shifted(logits: Tensor, alpha: float | Tensor) -> Tensor:
    row_max = logits.amax(-1, keepdim=True)
    y = logits - torch.where(row_max == -torch.inf, 0.0, row_max)
    return y if isinstance(alpha, float) and alpha == 2.0 else y * (alpha - 1)


def _divided(powers: Tensor, total: Tensor) -> Tensor:
    return powers / torch.where(total == 0, 1.0, total)


def _run(compiled: Callable[..., Tensor], eager: Callable[..., Tensor], rows: Tensor, *args: Any) -> Tensor:
    mode = _state["mode"]
    if mode == "off" or (mode == "auto" and rows.numel() < WORTH_COMPILING):
        return eager(rows, *args)
    if not _state["said"]:
        _log.info("sparse normalizers are compiled; the first steps take some seconds longer (compile=off: eager)")
        _state["said"] = True
    try:
        return compiled(rows, *args)
    except Exception as error:  # whatever a missing compiler or triton raises; what is wrong with the input comes again
        if mode == "on":
            raise
        _state["mode"] = "off"
        _log.info("torch.compile failed (%s): sparse normalizers run eagerly", _first_line(error))
        return eager(rows, *args)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _chunks(size: int, *tensors: Any) -> Iterator[list[Any]]:
    """The tensors' rows in pieces of ``size`` elements, on a CPU; elsewhere whole. What is no tensor goes along."""
    n_rows, n_keys = tensors[0].shape
    rows = max(1, size // n_keys) if tensors[0].device.type == "cpu" else n_rows
    for start in range(0, n_rows, rows):
        yield [each[start : start + rows] if isinstance(each, Tensor) else each for each in tensors]


def _visible(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else torch.where(mask, rows, -torch.inf)


def _solve_eager(rows_NxK: Tensor, alpha: float | Tensor, mask_NxK: Tensor | None) -> Tensor:
    out_NxK = torch.empty_like(rows_NxK, memory_format=torch.contiguous_format)
    for rows, part, mask, out in _chunks(EAGER_CHUNK, rows_NxK, alpha, mask_NxK, out_NxK):
        y = _shifted(_visible(rows, mask), part)
        tau = torch.full_like(y[:, :1], -1.0)
        while True:
            _, _, tau, open_rows = newton_pass(y, tau, part)
            if not open_rows.any():
                break
        powers, total, _, _ = newton_pass(y, tau, part)  # the last step squares an error that was rounding already
        out.copy_(_divided(powers, total))
    return out_NxK


def _pull_back_eager(weights_NxK: Tensor, grad_NxK: Tensor, alpha: float) -> Tensor:
    out_NxK = torch.empty_like(weights_NxK, memory_format=torch.contiguous_format)
    for weights, grad, out in _chunks(EAGER_CHUNK, weights_NxK, grad_NxK, out_NxK):
        out.copy_(project(metric(weights, alpha), grad))
    return out_NxK


def _solve_compiled(rows_NxK: Tensor, alpha: float | Tensor, mask_NxK: Tensor | None) -> Tensor:
    out_NxK = torch.empty_like(rows_NxK, memory_format=torch.contiguous_format)
    fixed = None if isinstance(alpha, Tensor) else alpha
    for rows, part, mask, out in _chunks(FUSED_CHUNK, rows_NxK, alpha, mask_NxK, out_NxK):
        rows = _visible(rows, mask)  # outside of the kernel, which would mask anew in every pass
        tau = rows.new_full((len(rows), 1), -1.0)
        passes = 5 if fixed is not None and fixed <= 1.5 else 6  # enough for N(0, 1)
        while True:
            tau, unfinished = _fused_solve(fixed, passes)(rows, tau, out, *([part] if fixed is None else []))
            if not unfinished:
                break
            passes = 2
    return out_NxK


@functools.cache
def _fused_solve(alpha: float | None, passes: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel: so many passes, and one that writes the weights to ``out``; the tau to go on from, and whether to.

    alpha is a number, or None where the kernel takes one a row.
    """

    def kernel(logits: Tensor, tau: Tensor, out: Tensor, alpha_Nx1: Tensor | None = None) -> tuple[Tensor, Tensor]:
        given: Any = alpha if alpha_Nx1 is None else alpha_Nx1
        y = _shifted(logits, given)
        for _ in range(passes):
            tau = newton_pass(y, tau, given)[2]
        powers, total, moved, open_rows = newton_pass(y, tau, given)
        out.copy_(_divided(powers, total))
        return moved, open_rows.any()

    return _compile(kernel)


def _compile(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel for all lengths. torch counts variants by source line, and gives up after a few."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(kernel, dynamic=True, fullgraph=True)


def _pull_back_compiled(weights_NxK: Tensor, grad_NxK: Tensor, alpha: float) -> Tensor:
    out_NxK = torch.empty_like(weights_NxK, memory_format=torch.contiguous_format)
    for weights, grad, out in _chunks(FUSED_CHUNK, weights_NxK, grad_NxK, out_NxK):
        _fused_pull_back(alpha)(weights, grad, out)
    return out_NxK


@functools.cache
def _fused_pull_back(alpha: float) -> Callable[..., None]:
    def kernel(weights: Tensor, grad: Tensor, out: Tensor) -> None:
        out.copy_(project(metric(weights, alpha), grad))

    return _compile(kernel)
