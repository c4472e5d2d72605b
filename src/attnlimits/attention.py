"""Attention with an exchangeable normalizer, as a Hugging Face attention interface.

``attach`` hangs one normalizer on every attention layer of a decoder and selects this interface. Two paths compute the
same thing: the fused one, where the normalizer is softmax of rescaled rows and scaled_dot_product_attention does the
work without a Q x K tensor; and the explicit one, which all others take and which hands out the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .normalizers import Normalizer, make_normalizer

INTERFACE = "attnlimits"
SETTINGS = "attnlimits"  # the key of a model's config under which attach notes what it was given


def visibility_mask(
    *, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """The mask function of the interface: bool (B, 1, Q, K), True = visible, or None = causal, aligned bottom right.

    None is returned only where causality alone tells all: no padding, and as many keys as queries or a single query.
    Hugging Face also skips the mask for the first call on a static cache, where it means top left; not here.
    """
    unambiguous = q_length == kv_length or q_length == 1
    kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, allow_is_causal_skip=allow_is_causal_skip and unambiguous, **kwargs
    )


def normalized_attention(
    module: nn.Module,
    query_BxHxQxD: Tensor,
    key_BxHxKxD: Tensor,
    value_BxHxKxD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of the interface.

    Returns:
        The output (B, Q, H, D), and the weights (B, H, Q, K) before dropout if they were asked for, else None.
    """
    normalizer = module.normalizer
    if not isinstance(normalizer, Normalizer):
        raise TypeError(
            f"{type(module).__name__} has no normalizer: call attnlimits.attention.attach(model, ...) first"
        )
    groups = query_BxHxQxD.shape[1] // key_BxHxKxD.shape[1]
    key_BxHxKxD, value_BxHxKxD = repeat_kv(key_BxHxKxD, groups), repeat_kv(value_BxHxKxD, groups)
    scaling = query_BxHxQxD.shape[-1] ** -0.5 if scaling is None else scaling
    mask = _as_visible(attention_mask)
    if mask is None and not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal and came without a mask: not supported")
    explicit = module.wants_weights or not normalizer.rescales_rows
    attend = _explicit_attention if explicit else _fused_attention
    output_BxHxQxD, weights = attend(
        normalizer, query_BxHxQxD, key_BxHxKxD, value_BxHxKxD, mask, scaling, dropout if module.training else 0.0
    )
    observer: Any = module.observer
    if observer is not None:
        observer(module, query_BxHxQxD, key_BxHxKxD, value_BxHxKxD, mask, scaling, output_BxHxQxD)
    return output_BxHxQxD.transpose(1, 2).contiguous(), weights if module.wants_weights else None


def _as_visible(attention_mask: Tensor | None) -> Tensor | None:
    """A user's own 4-D mask may be additive; ours are bool."""
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return attention_mask
    return attention_mask > torch.finfo(attention_mask.dtype).min / 2


def _fused_attention(
    normalizer: Normalizer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, None]:
    scale_HxQ = normalizer.row_scale(_visible_counts(query, key, mask))
    if scale_HxQ is not None:
        query = query * scale_HxQ[..., None].to(query.dtype)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and query.shape[-2] > 1,
        scale=scaling / normalizer.T,
    )
    return output, None


def _explicit_attention(
    normalizer: Normalizer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    # Autocast would compute logits in half precision, in which sparse normalizers are badly wrong.
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        logits_BxHxQxK = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scaling
        if mask is None:
            mask = _causal_mask(query.shape[-2], key.shape[-2], query.device)
        weights_BxHxQxK = normalizer(logits_BxHxQxK, mask)
    weights_BxHxQxK = weights_BxHxQxK.to(value.dtype)
    return F.dropout(weights_BxHxQxK, p=dropout) @ value, weights_BxHxQxK


def _visible_counts(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """(1 or B, 1, Q): how many keys each query row sees."""
    if mask is not None:
        return mask.sum(-1)
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    return torch.arange(n_keys - n_queries + 1, n_keys + 1, device=query.device)[None, None]


def _causal_mask(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)


AttentionInterface.register(INTERFACE, normalized_attention)
AttentionMaskInterface.register(INTERFACE, visibility_mask)


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every self-attention layer of a decoder that goes through the interface, in order."""
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", False):
            yield name, module


def attach(model: PreTrainedModel, spec: Mapping[str, Any], *, T: float, context_length: int) -> PreTrainedModel:
    """Give every attention layer its own normalizer and switch the model to this interface, in place.

    Call it on a loaded model: from_pretrained leaves parameters that it does not find uninitialised.

    Args:
        model: a Hugging Face decoder.
        spec: ``name`` of the normalizer and its options.
        T: temperature by which the logits are divided.
        context_length: longest training row.

    Raises:
        ValueError: the model's attention does not go through the interface.
    """
    layers = [module for _, module in attention_layers(model)]
    if len(layers) != model.config.num_hidden_layers:
        raise ValueError(
            f"{type(model).__name__}: found {len(layers)} attention layers of {model.config.num_hidden_layers}; "
            "its attention does not go through Hugging Face's interface"
        )
    heads = model.config.num_attention_heads
    for layer in layers:
        normalizer = make_normalizer(spec, T=T, n_heads=heads, context_length=context_length)
        reference = next(layer.parameters())
        layer.normalizer = normalizer.to(device=reference.device, dtype=reference.dtype)
        layer.wants_weights = False  # type: ignore[assignment]
        layer.observer = None  # type: ignore[assignment]  # set by the probe while it runs
    model.set_attn_implementation(INTERFACE)
    setattr(model.config, SETTINGS, {"spec": dict(spec), "T": T, "context_length": context_length})
    if getattr(model.base_model, "weights_hook", None) is None:
        hook = model.base_model.register_forward_pre_hook(_set_wants_weights, with_kwargs=True)
        model.base_model.weights_hook = hook  # type: ignore[assignment]
    return model


def detach(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """Undo :func:`attach`, in place: back to one of Hugging Face's own implementations, "sdpa" or "eager"."""
    for _, layer in attention_layers(model):
        del layer.normalizer, layer.wants_weights, layer.observer
    model.set_attn_implementation(implementation)
    delattr(model.config, SETTINGS)
    hook: Any = model.base_model.weights_hook
    hook.remove()
    del model.base_model.weights_hook
    return model


def _set_wants_weights(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``output_attentions=True`` must not come back empty on the fused path: the interface is not told of it."""
    for _, layer in attention_layers(decoder):
        layer.wants_weights = bool(kwargs.get("output_attentions"))  # type: ignore[assignment]
