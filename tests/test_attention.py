"""The attention interface: softmax at T = 1 is plain Hugging Face, and no normalizer sees the future or the padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from attnlimits.attention import attach, attention_layers
from attnlimits.normalizers import REGISTRY

NAMES = sorted(REGISTRY)
every_normalizer = pytest.mark.parametrize("name", NAMES)
LENGTH = 24


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    """GPT-2 as Hugging Face computes it, eager, in float64, with logits large enough to matter."""
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 61, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).double().eval()
    for _, layer in attention_layers(model):
        layer.c_attn.weight.data *= 6
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(61, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def with_normalizer(model: PreTrainedModel, name: str, T: float = 1.0) -> PreTrainedModel:
    return attach(copy.deepcopy(model), {"name": name}, T=T, context_length=64)


def padding(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    lengths = torch.tensor([LENGTH, LENGTH - 5, 7])[:, None]
    positions = torch.arange(LENGTH)[None]
    real = positions < lengths
    return (real.flip(1) if kind == "left" else real).long()


def run(model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Logits, with positions that count real tokens as generate() does."""
    if mask is None:
        return model(tokens).logits
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions).logits


def loss_on_real_tokens(logits: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    labels = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
    if mask is not None:  # under left padding the first real token would be predicted from a padded row
        labels = labels.masked_fill(F.pad(mask, (1, 0))[:, :-1] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
def test_softmax_at_T_1_is_plain_gpt2(plain: PreTrainedModel, tokens: Tensor, kind: str, checkpointing: bool) -> None:
    ours, mask = with_normalizer(plain, "softmax"), padding(kind)
    theirs = copy.deepcopy(plain)
    if checkpointing:
        ours.activation_checkpointing_enable()
        ours.train()
        for module in ours.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    expected, actual = run(theirs, tokens, mask), run(ours, tokens, mask)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(actual[real], expected[real], atol=1e-12, rtol=0)
    loss_on_real_tokens(expected, tokens, mask).backward()
    loss_on_real_tokens(actual, tokens, mask).backward()
    gradients = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, atol=1e-12, rtol=0, msg=name)


def test_generation_with_cache_equals_plain_gpt2(plain: PreTrainedModel, tokens: Tensor) -> None:
    mask = padding("left")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    expected = plain.generate(tokens, **options)
    ours = with_normalizer(plain, "softmax")
    assert torch.equal(ours.generate(tokens, **options), expected)
    assert torch.equal(ours.generate(tokens, **options, use_cache=False), expected)


@every_normalizer
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_generation_is_the_same_with_and_without_cache(
    plain: PreTrainedModel, tokens: Tensor, name: str, cache_implementation: str | None
) -> None:
    model, mask = with_normalizer(plain, name, T=0.5), padding("left")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    cached = model.generate(tokens, **options, cache_implementation=cache_implementation, disable_compile=True)
    assert torch.equal(cached, model.generate(tokens, **options, use_cache=False))


@every_normalizer
def test_static_cache_and_chunked_prefill_give_the_same_logits(
    plain: PreTrainedModel, tokens: Tensor, name: str
) -> None:
    model = with_normalizer(plain, name)
    expected = model(tokens).logits
    for first in (1, 9):
        cache = StaticCache(config=model.config, max_cache_len=40)
        head = model(tokens[:, :first], cache=cache, use_cache=True).logits
        tail = model(tokens[:, first:], cache=cache, use_cache=True).logits
        torch.testing.assert_close(torch.cat([head, tail], 1), expected, atol=1e-12, rtol=0)


@every_normalizer
@pytest.mark.parametrize("T", [0.05, 1.0])
@pytest.mark.parametrize("explicit", [False, True], ids=["", "weights asked"])
def test_no_normalizer_sees_the_future(
    plain: PreTrainedModel, tokens: Tensor, name: str, T: float, explicit: bool
) -> None:
    model = with_normalizer(plain, name, T)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 61
    before = model(tokens, output_attentions=explicit).logits[:, :-1]
    after = model(changed, output_attentions=explicit).logits[:, :-1]
    assert torch.equal(before, after)


@every_normalizer
def test_gradient_of_a_position_reaches_only_its_past(plain: PreTrainedModel, name: str) -> None:
    model = with_normalizer(plain, name)
    embedded = torch.randn(1, 10, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    model(inputs_embeds=embedded).logits[0, 4].sum().backward()
    reached = embedded.grad[0].abs().sum(-1)
    assert reached[4] > 0
    if name == "softmax":  # others may give a past key no weight
        assert (reached[:5] > 0).all()
    assert torch.equal(reached[5:], torch.zeros(5, dtype=torch.float64))


@every_normalizer
def test_appended_tokens_change_no_earlier_row(plain: PreTrainedModel, tokens: Tensor, name: str) -> None:
    model = with_normalizer(plain, name)
    torch.testing.assert_close(model(tokens[:, :11]).logits, model(tokens).logits[:, :11], atol=1e-12, rtol=0)


@every_normalizer
@pytest.mark.parametrize("kind", ["left", "right"])
def test_padded_row_equals_the_row_alone(plain: PreTrainedModel, tokens: Tensor, name: str, kind: str) -> None:
    model, mask = with_normalizer(plain, name), padding(kind)
    padded = run(model, tokens, mask)
    for row in range(3):
        alone = model(tokens[row : row + 1, mask[row].bool()]).logits[0]
        torch.testing.assert_close(padded[row, mask[row].bool()], alone, atol=1e-12, rtol=0)


@every_normalizer
def test_weights_come_when_asked_and_fused_equals_explicit(plain: PreTrainedModel, tokens: Tensor, name: str) -> None:
    model = with_normalizer(plain, name, T=0.7)
    asked = model(tokens, output_attentions=True)
    torch.testing.assert_close(model(tokens).logits, asked.logits, atol=1e-12, rtol=0)
    assert len(asked.attentions) == 2
    for weights in asked.attentions:
        assert weights.shape == (3, 4, LENGTH, LENGTH)
        assert torch.equal(weights.triu(1), torch.zeros_like(weights))
        if REGISTRY[name].properties.row_sum == "one":
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, LENGTH, dtype=torch.float64))
    assert model(tokens).attentions is None


def test_weights_are_those_before_dropout(plain: PreTrainedModel, tokens: Tensor) -> None:
    model = with_normalizer(plain, "softmax").train()
    for weights in model(tokens, output_attentions=True).attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, LENGTH, dtype=torch.float64))


def test_temperature_divides_the_logits(plain: PreTrainedModel, tokens: Tensor) -> None:
    """T = 1/2 on the same model is T = 1 with queries twice as large."""
    sharper = copy.deepcopy(plain)
    for _, layer in attention_layers(sharper):
        layer.c_attn.weight.data[:, :32] *= 2
        layer.c_attn.bias.data[:32] *= 2
    expected = with_normalizer(sharper, "softmax")(tokens).logits
    torch.testing.assert_close(with_normalizer(plain, "softmax", T=0.5)(tokens).logits, expected, atol=1e-12, rtol=0)


def test_users_additive_4d_mask_is_understood(plain: PreTrainedModel, tokens: Tensor) -> None:
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(3, 1, -1, -1)
    additive = torch.zeros(3, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(
        ~visible, torch.finfo(torch.float64).min
    )
    model = with_normalizer(plain, "sparsemax")
    torch.testing.assert_close(model(tokens, attention_mask=additive).logits, model(tokens).logits)


@every_normalizer
def test_autocast_normalizes_in_float32(plain: PreTrainedModel, tokens: Tensor, name: str) -> None:
    model = with_normalizer(plain, name).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        asked = model(tokens, output_attentions=True)
    for weights in asked.attentions if REGISTRY[name].properties.row_sum == "one" else ():
        assert (weights.double().sum(-1) - 1).abs().max() < 0.02  # the sum of bf16 numbers, each rounded once


@every_normalizer
def test_decoders_with_grouped_heads_go_through_the_interface(tokens: Tensor, name: str) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**shape, **heads, pad_token_id=0, bos_token_id=0, eos_token_id=0))
    llama = llama.double().eval()
    expected = llama(tokens).logits
    actual = with_normalizer(llama, name)(tokens).logits
    if name in ("softmax", "elastic"):  # which starts as softmax
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    else:
        assert (actual - expected).abs().max() > 1e-6


def test_model_outside_the_interface_is_refused(plain: PreTrainedModel) -> None:
    model = copy.deepcopy(plain)
    del model.transformer.h[1]
    with pytest.raises(ValueError, match="1 attention layers of 2"):
        attach(model, {"name": "softmax"}, T=1.0, context_length=64)


FUSED_VARIANTS = (
    {"name": "softmax", "learnable": True},
    {"name": "ssmax", "bias": True},
    {"name": "log_length", "variant": "yarn", "n_train": 4},
    {"name": "log_length", "variant": "critical", "gamma": 0.7},
)


@pytest.mark.parametrize("spec", FUSED_VARIANTS, ids=str)
def test_fused_equals_explicit_for_every_variant(plain: PreTrainedModel, tokens: Tensor, spec: dict) -> None:
    model = attach(copy.deepcopy(plain), spec, T=0.7, context_length=64).double()
    for _, layer in attention_layers(model):
        for parameter in layer.normalizer.parameters():
            parameter.data = torch.linspace(0.3, 0.9, parameter.numel(), dtype=torch.float64)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0  # left padding
    fused = model(tokens, attention_mask=mask).logits
    explicit = model(tokens, attention_mask=mask, output_attentions=True).logits
    torch.testing.assert_close(fused[mask.bool()], explicit[mask.bool()], atol=1e-12, rtol=0)
