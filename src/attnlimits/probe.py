"""One side-effect-free pass over a model that hands out every attention layer, for a chosen set of query rows.

    for values in probe(model, input_ids, measure, n_rows=128): ...
    values, gradients = probe_with_gradients(model, tokens, measure)

The model runs in eval mode, so nothing random is drawn; its train mode comes back as it was, no gradient is left
behind, and a layer's tensors are gone before the next layer's are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import attention_layers
from .metrics.likelihood import token_nll
from .normalizers import Normalizer

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class LayerView:
    """What one attention layer did with the chosen query rows, in float32 or better.

    Attributes:
        index: of the layer, from 0.
        normalizer: its own.
        logits_BxHxRxK: scaled, not divided by T.
        mask: bool, broadcastable to the logits, True = visible.
        weights_BxHxRxK: before dropout.
        values_BxHxKxD: value vectors.
    """

    index: int
    normalizer: Normalizer
    logits_BxHxRxK: Tensor
    mask: Tensor
    weights_BxHxRxK: Tensor
    values_BxHxKxD: Tensor


@dataclass(frozen=True)
class AttentionCall:
    """The tensors of one attention call; what is large is computed for the asked rows only."""

    index: int
    normalizer: Normalizer
    query_BxHxQxD: Tensor
    key_BxHxKxD: Tensor
    value_BxHxKxD: Tensor
    visible: Tensor | None  # of the model, (B, 1, Q, K); None = causal
    scaling: float
    output_BxHxQxD: Tensor
    hidden_BxKxE: Tensor  # what the layer computed keys and values from

    def logits(self, rows: Tensor, *, n_keys: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scaled, not divided by T, in ``dtype`` or what is wider."""
        dtype = torch.promote_types(self.query_BxHxQxD.dtype, dtype)
        chosen = self.query_BxHxQxD.index_select(-2, rows).to(dtype)
        return chosen @ self.key_BxHxKxD[..., :n_keys, :].to(dtype).transpose(-1, -2) * self.scaling

    def mask(self, rows: Tensor, *, n_keys: int | None = None) -> Tensor:
        if self.visible is not None:
            return self.visible.index_select(-2, rows)[..., :n_keys]
        return torch.arange(self.key_BxHxKxD.shape[-2], device=rows.device)[:n_keys] <= rows[:, None]

    def view(self, rows: Tensor, *, n_keys: int | None = None, dtype: torch.dtype = torch.float32) -> LayerView:
        """What the layer did with these rows.

        Args:
            rows: of queries.
            n_keys: the first so many keys alone; no row may see more.
            dtype: of the arithmetic from logits to weights, or what is wider.
        """
        logits, mask = self.logits(rows, n_keys=n_keys, dtype=dtype), self.mask(rows, n_keys=n_keys)
        values = self.value_BxHxKxD[..., :n_keys, :]
        return LayerView(self.index, self.normalizer, logits, mask, self.normalizer(logits, mask), values)

    def logit_gradient(self, grad_BxHxQxD: Tensor, rows: Tensor) -> Tensor:
        logits = self.logits(rows).detach().requires_grad_()
        weights = self.normalizer(logits, self.mask(rows))
        by_weights = grad_BxHxQxD.index_select(-2, rows) @ self.value_BxHxKxD.detach().transpose(-1, -2)
        (by_logits,) = torch.autograd.grad(weights, logits, by_weights.to(weights.dtype))
        return by_logits.double().square().sum(-1).mean(dim=(0, -1)).sqrt()


def spread_rows(length: int, n_rows: int) -> Tensor:
    """At most ``n_rows`` of the query rows 0 .. length - 1, evenly spread, the last always among them."""
    return torch.linspace(length - 1, 0, min(n_rows, length), dtype=torch.float64).round().long().flip(0)


def probe(
    model: PreTrainedModel, input_ids_BxL: Tensor, measure: Callable[[LayerView], Measured], *, n_rows: int = 128
) -> list[Measured]:
    """Run the model once, and ``measure`` on every attention layer.

    Args:
        model: with a normalizer attached.
        input_ids_BxL: without padding.
        measure: called once a layer, in order, without gradients; keep only small results of it.
        n_rows: how many query rows; all where the blocks are shorter.

    Returns:
        What ``measure`` returned, layer by layer.

    Raises:
        ValueError: the model has no attention layer with a normalizer.
    """
    rows = spread_rows(input_ids_BxL.shape[1], n_rows).to(input_ids_BxL.device)
    return each_layer(model, input_ids_BxL, lambda call: measure(call.view(rows)))


def each_layer(
    model: PreTrainedModel, input_ids_BxL: Tensor, visit: Callable[[AttentionCall], Measured]
) -> list[Measured]:
    """:func:`probe` for visitors that choose their rows themselves, so that no Q x K tensor of all rows is made."""
    visited: list[Measured] = []
    with _observed(model, lambda call: visited.append(visit(call))), torch.no_grad():
        model.base_model(input_ids=input_ids_BxL, use_cache=False)
    return visited


def probe_with_gradients(
    model: PreTrainedModel, tokens_BxL1: Tensor, measure: Callable[[LayerView], Measured], *, n_rows: int = 128
) -> tuple[list[Measured], Tensor]:
    """:func:`probe` on all tokens but the last, and from the same pass how much the loss changes with the logits.

    Of every chosen row the norm of d loss / d logits is taken, the loss being the sum over all predicted tokens in
    nats: of the mean it would shrink with the number of tokens. This is the gradient that vanishes with saturated or
    very sharp attention. Nothing is added to any ``.grad``.

    Returns:
        What ``measure`` returned, layer by layer; and (layers, H), the root mean square of that norm over blocks and
        rows.
    """
    calls: list[AttentionCall] = []
    measured: list[Measured] = []
    # Lightning validates in inference mode, in which no graph could be made.
    with torch.inference_mode(False), torch.enable_grad():
        tokens = tokens_BxL1.clone()
        rows = spread_rows(tokens.shape[1] - 1, n_rows).to(tokens.device)

        def observe(call: AttentionCall) -> None:
            calls.append(call)
            with torch.no_grad():
                measured.append(measure(call.view(rows)))

        with _observed(model, observe):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = token_nll(logits, tokens[:, 1:]).double().sum()
            by_output = torch.autograd.grad(loss, [call.output_BxHxQxD for call in calls])
            norms = [call.logit_gradient(grad, rows) for call, grad in zip(calls, by_output, strict=True)]
    return measured, torch.stack(norms)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards every module is in the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _observed(model: PreTrainedModel, observe: Callable[[AttentionCall], None]) -> Iterator[None]:
    """In eval mode, and with every attention layer telling ``observe`` of its call; afterwards as before."""
    layers = [
        layer for _, layer in attention_layers(model) if isinstance(getattr(layer, "normalizer", None), Normalizer)
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no normalizer: call attnlimits.attention.attach(model, ...) first"
        )
    hooks = []
    for index, layer in enumerate(layers):
        hidden: list[Tensor] = []
        hooks.append(layer.register_forward_pre_hook(_keep_hidden(hidden), with_kwargs=True))
        layer.observer = _observer(index, hidden, observe)  # type: ignore[assignment]
    try:
        with evaluating(model), torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        for layer, hook in zip(layers, hooks, strict=True):
            layer.observer = None  # type: ignore[assignment]
            hook.remove()


def _keep_hidden(hidden: list[Tensor]) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden[:] = [args[0] if args else kwargs["hidden_states"]]

    return keep


def _observer(index: int, hidden: list[Tensor], observe: Callable[[AttentionCall], None]) -> Callable[..., None]:
    def tell(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        output: Tensor,
    ) -> None:
        normalizer: Any = module.normalizer
        observe(AttentionCall(index, normalizer, query, key, value, mask, scaling, output, hidden.pop()))

    return tell
