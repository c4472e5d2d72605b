"""Bits per character of a causal model on the last part of a text that its training did not see.

    python benchmarks/gpt2_mini.py path/to/war_and_peace.txt --json gpt2_mini.json

The last 5 % of the characters, tokenised on their own, in windows of 1024 tokens that do not overlap: a window's first
tokens have little context, so the figure is on the safe side. Every token but the very first is predicted once; the
bits are over all characters but that token's.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from figures import report
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attnlimits.config import PROJECT
from attnlimits.metrics.likelihood import token_nll


@torch.inference_mode()
def bits_per_character(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, context_length: int
) -> float:
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])[None]
    nats = 0.0
    for start in range(0, ids.shape[1] - 1, context_length):
        window = ids[:, start : start + context_length + 1]
        nats += token_nll(model(window[:, :-1]).logits, window[:, 1:]).double().sum().item()
    return nats / math.log(2) / (len(text) - len(tokenizer.decode(ids[0, :1])))


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits per character on the last part of a text.")
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default=PROJECT / "models" / "gpt2-mini", type=Path)
    parser.add_argument("--fraction", default=0.05, type=float, help="of the characters, from the end")
    parser.add_argument("--json", type=Path, help="write machine and figures to this file")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    held_out = text[len(text) - round(len(text) * arguments.fraction) :]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    figures = {"gpt2_mini_bits_per_character": bits_per_character(model, tokenizer, held_out, context_length=1024)}
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
