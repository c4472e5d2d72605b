"""The probe sees what the model computes, and leaves no trace."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from attnlimits.attention import attach
from attnlimits.metrics.likelihood import token_nll
from attnlimits.normalizers import REGISTRY
from attnlimits.probe import probe, probe_with_gradients, spread_rows


def tiny(kind: str = "gpt2", name: str = "softmax", T: float = 1.0) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=50))
    else:
        shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
        model = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=32, vocab_size=50))
    return attach(model, {"name": name}, T=T, context_length=32).double()


TOKENS = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("name", ["softmax", "ssmax", "sparsemax"])
def test_weights_are_those_of_the_model(kind: str, name: str) -> None:
    model = tiny(kind, name, T=0.5).eval()
    layers = probe(model, TOKENS, lambda view: (view.weights_BxHxRxK, view.index), n_rows=5)
    rows = spread_rows(13, 5)
    assert rows.tolist() == [0, 3, 6, 9, 12]
    for (weights, index), expected in zip(layers, model(TOKENS, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(weights, expected[:, :, rows], msg=f"layer {index}")


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_logit_gradients_are_those_of_autograd(name: str) -> None:
    """Against a bias added to every logit, whose gradient autograd gives."""
    model = tiny(name=name, T=0.7).eval()
    found = probe_with_gradients(model, TOKENS, lambda view: None, n_rows=100)[1]
    for index, block in enumerate(model.transformer.h):
        normalize, biases = block.attn.normalizer.normalize, []

        def with_bias(z: torch.Tensor, mask: torch.Tensor, normalize=normalize, biases=biases) -> torch.Tensor:
            biases.append(torch.zeros_like(z, requires_grad=True))
            return normalize(z + biases[-1], mask)

        block.attn.normalizer.normalize = with_bias
        block.attn.normalizer.rescales_rows = False  # through the explicit path
        logits = model(TOKENS[:, :-1]).logits
        token_nll(logits, TOKENS[:, 1:]).sum().backward()
        del block.attn.normalizer.normalize, block.attn.normalizer.rescales_rows
        by_logits = biases[0].grad / 0.7  # the bias is added after the division by T
        torch.testing.assert_close(found[index], by_logits.square().sum(-1).mean(dim=(0, -1)).sqrt())


def test_nothing_is_left_behind() -> None:
    model = tiny().train()
    model.transformer.h[1].eval()  # a mode of its own, which must come back
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    with torch.inference_mode():  # as Lightning validates
        probe(model, TOKENS, lambda view: None)
        probe_with_gradients(model, TOKENS, lambda view: None)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(layer.attn.observer is None for layer in model.transformer.h)


def test_modes_come_back_after_a_failure() -> None:
    model = tiny().train()

    def fail(view: object) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        probe(model, TOKENS, fail)
    assert model.training
    assert model.transformer.h[0].attn.observer is None


def test_model_without_normalizer_is_refused() -> None:
    plain = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=50))
    with pytest.raises(ValueError, match="attach"):
        probe(plain, TOKENS, lambda view: None)


def test_rows_are_spread_and_end_with_the_last() -> None:
    assert spread_rows(1024, 128).tolist()[-1] == 1023
    assert len(set(spread_rows(1024, 128).tolist())) == 128
    assert spread_rows(4, 128).tolist() == [0, 1, 2, 3]
