"""The decoder under study: load, fit out with a normalizer, save, reload.

    model = load("outputs/.../model")      # with the normalizer and the parameters it was trained with

A saved directory is a plain Hugging Face one; its config.json names the normalizer under ``attnlimits``, and a file
beside it holds the normalizer's parameters. ``AutoModelForCausalLM.from_pretrained`` opens it too: as the same weights
under plain softmax.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from .attention import SETTINGS, attach
from .config import ConfigError, plain

NORMALIZER_WEIGHTS = "normalizer.safetensors"
BACKBONE_CONFIG = "backbone_config"  # in a checkpoint: the model's config as plain types
END_OF_TEXT = "<|endoftext|>"


def load(path: str | Path) -> PreTrainedModel:
    """A trained model with its normalizer and that one's parameters, in float32 and eval mode. Never asks the network.

    Args:
        path: a directory that :func:`save` wrote (``outputs/<date>/<run>/model``), or a checkpoint of train.py
            (``outputs/<date>/<run>/checkpoints/last.ckpt``).

    Raises:
        OSError: no such directory or file.
        ValueError: the model was saved without a normalizer.
    """
    path = Path(path)
    return (_load_checkpoint(path) if path.is_file() else _load_directory(path)).eval()


def _load_directory(path: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    if not hasattr(model.config, SETTINGS):
        raise ValueError(f"{path}: its config.json names no normalizer; attach one with attnlimits.attention.attach")
    attach(model, **getattr(model.config, SETTINGS))
    if (path / NORMALIZER_WEIGHTS).is_file():
        _load_normalizer_state(model, load_file(path / NORMALIZER_WEIGHTS))
    return model


def _load_checkpoint(path: Path) -> PreTrainedModel:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: not a checkpoint, or a damaged one") from error
    if BACKBONE_CONFIG not in checkpoint:
        raise ValueError(f"{path}: not a checkpoint of train.py")
    declared = checkpoint[BACKBONE_CONFIG]
    config = AutoConfig.for_model(**declared)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    attach(model, **declared[SETTINGS])
    state = checkpoint["state_dict"]
    model.load_state_dict({key.removeprefix("backbone."): state[key] for key in state if key.startswith("backbone.")})
    return model


def save(model: PreTrainedModel, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write what :func:`load` reads, and what plain Hugging Face reads without this package."""
    path = Path(path)
    state = model.state_dict()
    normalizer_state = {key: value.contiguous() for key, value in state.items() if _is_normalizer_key(key)}
    plain_state = {key: value for key, value in state.items() if key not in normalizer_state}
    model.save_pretrained(path, state_dict=plain_state)
    if normalizer_state:
        save_file(normalizer_state, path / NORMALIZER_WEIGHTS)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def _is_normalizer_key(key: str) -> bool:
    return ".normalizer." in key


def _load_normalizer_state(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    expected = {key for key in model.state_dict() if _is_normalizer_key(key)}
    if expected != set(state):
        raise ValueError(f"{NORMALIZER_WEIGHTS}: holds {sorted(state)}, the normalizer has {sorted(expected)}")
    model.load_state_dict(state, strict=False)


def build(cfg: DictConfig, *, corpus: Iterable[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of a training configuration, the normalizer attached.

    Args:
        cfg: the composed conf/train.yaml.
        corpus: training text, for the tokenizer of a model from scratch.
    """
    if cfg.model.scratch is not None:
        model, tokenizer = _from_scratch(cfg.model.scratch, corpus)
    else:
        model, tokenizer = pretrained(cfg.model.path)
    return fit_out(model, cfg), tokenizer


def fit_out(model: PreTrainedModel, cfg: DictConfig) -> PreTrainedModel:
    """Set dropout and gradient checkpointing, attach the normalizer."""
    if cfg.model.dropout is not None:
        _set_dropout(model, cfg.model.dropout)
    if cfg.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return attach(model, plain(cfg.normalizer), T=cfg.T, context_length=cfg.context_length)


def _set_dropout(model: PreTrainedModel, p: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"):
        if hasattr(model.config, key):
            setattr(model.config, key, p)


def pretrained(path: str | Path, *, key: str = "model.path") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Weights and tokenizer of a local directory or a hub name, weights in float32. Never random weights instead.

    Raises:
        ConfigError: either cannot be had; ``key`` is the option that named the path.
    """
    try:
        # Explicit float32: by default the weights keep the dtype of the file, which may be half precision.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError) as error:
        line = str(error).strip().split("\n")[0]
        advice = f"set {key} to a local directory"
        raise ConfigError(f"{key}={path}: cannot be loaded ({line}); {advice}") from error
    return model, tokenizer


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or a hub name.

    Raises:
        ValueError: it came out empty, as GPT-2's does where the directory holds a model without tokenizer files.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    if len(tokenizer) < 256:
        raise ValueError(f"the tokenizer of {path} has only {len(tokenizer)} entries")
    return tokenizer


def _from_scratch(scratch: DictConfig, corpus: Iterable[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = train_tokenizer(corpus, scratch.vocab_size, scratch.n_positions)
    shape = {key: scratch[key] for key in ("n_layer", "n_head", "n_embd", "n_positions")}
    end = tokenizer.get_vocab()[END_OF_TEXT]
    # The same function as GPT-2's "gelu_new", in one kernel.
    config = GPT2Config(
        vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, activation_function="gelu_pytorch_tanh", **shape
    )
    return GPT2LMHeadModel(config), tokenizer


def train_tokenizer(corpus: Iterable[str], vocab_size: int, n_positions: int) -> PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer, byte-level BPE, trained on ``corpus``."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(corpus, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        model_max_length=n_positions,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
    )
