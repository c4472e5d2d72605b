"""Text to blocks: what is read, where it is cut, what is refused, and in which order it is served."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from attnlimits.config import ConfigError
from attnlimits.data import BatchStream, FixedBatches, cache_key, make_blocks, read_text, strip_gutenberg


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def data(compose_train: Callable) -> Callable[..., DictConfig]:
    """``data("data.path=x")``: the data section of the configuration."""
    return lambda *overrides: compose_train(["data=text", *overrides]).data


def test_default_text_is_pythons_own_reference(compose_train: Callable) -> None:
    text = read_text(compose_train([]).data)
    assert "expression" in text.train
    assert len(text.validation) / (len(text.train) + len(text.validation)) == pytest.approx(0.1, abs=1e-5)


def test_files_globs_and_folders_are_read_in_order(data: Callable, tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(f"<{name}>" * 50)
    for path, expected in (
        (f"{tmp_path}/*.txt", ["a.txt", "b.txt"]),
        (str(tmp_path), ["a.txt", "b.txt", "c.md"]),
        (f"[{tmp_path}/c.md,{tmp_path}/a.txt]", ["c.md", "a.txt"]),
    ):
        text = read_text(data(f"data.path={path}"))
        whole = text.train + text.validation
        assert sorted(expected, key=lambda name: whole.index(f"<{name}>")) == expected
        assert whole.count("<") == 50 * len(expected)


def test_bom_goes_and_line_ends_become_lf(data: Callable, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n" * 1 + b"four" * 20)
    text = read_text(data(f"data.path={tmp_path}/x.txt"))
    assert (text.train + text.validation).startswith("one\ntwo\nthree\nfour")


def test_extra_text_is_for_training_only(data: Callable, tmp_path: Path) -> None:
    (tmp_path / "main.txt").write_text("m" * 1000)
    (tmp_path / "extra.txt").write_text("e" * 500)
    text = read_text(data(f"data.path={tmp_path}/main.txt", f"data.extra_path={tmp_path}/extra.txt"))
    assert text.validation == "m" * 100
    assert text.train == "e" * 500 + "\n\n" + "m" * 900


def test_encodings_are_tried_in_order(data: Callable, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes("caf\u00e9 \u2019 ".encode("cp1252") * 20)
    text = read_text(data(f"data.path={tmp_path}/old.txt", "data.encoding=[utf-8,cp1252]"))
    assert text.train.startswith("caf\u00e9 \u2019")


REFUSED = {
    "missing": (None, "no such file"),
    "empty": (b"", "empty"),
    "blank": (b"\xef\xbb\xbf \r\n", "empty"),
    "latin-1": (b"caf\xe9 au lait", r"byte 3 is not utf-8.*data\.encoding="),
    "utf-16": ("text".encode("utf-16"), r"byte 0 is not utf-8.*data\.encoding="),
    "nul": (b"text\0text", "NUL"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_file_is_named(data: Callable, tmp_path: Path, case: str) -> None:
    content, complaint = REFUSED[case]
    path = tmp_path / f"{case}.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        read_text(data(f"data.path={path}"))
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_empty_folder_unreadable_file_and_unknown_encoding_are_refused(data: Callable, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="empty folder"):
        read_text(data(f"data.path={tmp_path}/folder"))
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"data\.encoding=klingon"):
        read_text(data(f"data.path={tmp_path}/x.txt", "data.encoding=klingon"))


def test_file_without_permission_is_refused(data: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "secret.txt").write_text("text")
    monkeypatch.setattr(Path, "read_bytes", denied)  # root, as whom CI runs, may read every file
    with pytest.raises(ConfigError, match=r"secret\.txt: cannot be read \(Permission denied\)"):
        read_text(data(f"data.path={tmp_path}/secret.txt"))


def test_gutenberg_header_and_licence_go() -> None:
    header, licence = "The Project Gutenberg eBook\n*** START OF IT ***\n\n", "\n\n*** END OF IT ***\nlicence"
    book = f"{header}Chapter 1\nText.{licence}"
    assert strip_gutenberg(book) == "Chapter 1\nText.\n"
    assert strip_gutenberg("Chapter 1\nText.\n") == "Chapter 1\nText.\n"


class Gutenberg(http.server.BaseHTTPRequestHandler):
    """Serves one book; counts how often it is asked."""

    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            ("header\r\n*** START OF IT ***\r\n" + "War. " * 100 + "\r\n*** END OF IT ***\r\nlicence").encode()
        )

    def log_message(self, *args: object) -> None:
        """Quiet."""


def test_war_and_peace_is_fetched_once(compose_train: Callable, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gutenberg)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cfg = compose_train(["data=war_and_peace", f"data.url=http://127.0.0.1:{server.server_port}/pg2600.txt"]).data
    texts = [read_text(cfg) for _ in range(2)]
    server.shutdown()
    server.server_close()
    assert Gutenberg.requests == 1
    assert texts[0] == texts[1]
    assert (texts[0].train + texts[0].validation).strip() == ("War. " * 100).strip()
    cfg.url = f"http://127.0.0.1:{server.server_port}/other.txt"
    with pytest.raises(ConfigError, match=r"data\.url=.*set data\.path"):
        read_text(cfg)


def test_blocks_hold_every_token_once_without_padding(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    text = random_words(700)
    blocks = make_blocks(text, tokenizer, 32, split="training", cache_dir=tmp_path)
    ids = tokenizer(text)["input_ids"]
    packed = blocks.batch(range(len(blocks)))
    assert packed.shape == ((len(ids) - 1) // 32, 33)
    assert packed[:, 1:].flatten().tolist() == ids[1 : 1 + 32 * len(blocks)]
    assert torch.equal(packed[1:, 0], packed[:-1, -1])
    assert blocks.characters_per_token == pytest.approx(len(text) / len(ids))


def test_too_short_a_text_gives_both_numbers(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    n_tokens = len(tokenizer("the war")["input_ids"])
    with pytest.raises(ConfigError, match=rf"context_length=32: the validation text has {n_tokens} tokens.*33"):
        make_blocks("the war", tokenizer, 32, split="validation", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.arrow"))


def test_cache_is_used_and_its_key_covers_text_tokenizer_and_length(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_words(300)
    first = make_blocks(text, tokenizer, 32, split="training", cache_dir=tmp_path)
    key = cache_key(text, tokenizer, 32)
    assert key not in {cache_key(text + " ", tokenizer, 32), cache_key(text, tokenizer, 33)}
    larger = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    larger.add_tokens(["prince Andrew"])
    assert cache_key(text, larger, 32) != key
    monkeypatch.setattr("attnlimits.data._pack", lambda *_: pytest.fail("tokenised again"))
    second = make_blocks(text, tokenizer, 32, split="training", cache_dir=tmp_path)
    assert torch.equal(first.batch(range(len(first))), second.batch(range(len(second))))


class Numbered:
    """Blocks that are their own index."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks

    def __len__(self) -> int:
        return self.n_blocks

    def batch(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(list(indices))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(n_blocks=st.integers(1, 12), batch=st.integers(1, 5), stop=st.integers(0, 9), seed=st.integers(0, 3))
def test_stream_passes_over_all_blocks_and_resumes_anywhere(n_blocks: int, batch: int, stop: int, seed: int) -> None:
    def stream() -> BatchStream:
        return BatchStream(Numbered(n_blocks), batch_size=batch, n_batches=9, seed=seed)

    straight = [b.tolist() for b in stream()]
    served = [index for b in straight for index in b]
    for start in range(0, len(served) - n_blocks + 1, n_blocks):
        assert sorted(served[start : start + n_blocks]) == list(range(n_blocks))
    first, second = stream(), stream()
    begun = [b.tolist() for b, _ in zip(first, range(stop), strict=False)] if stop else []
    second.load_state_dict({**second.state_dict(), "next_batch": len(begun)})
    assert begun + [b.tolist() for b in second] == straight


def test_ranks_share_the_batches_of_the_straight_order() -> None:
    options = {"batch_size": 2, "seed": 0}
    ranks = [BatchStream(Numbered(8), n_batches=4, rank=r, world_size=2, **options) for r in range(2)]
    interleaved = [b.tolist() for pair in zip(*ranks, strict=True) for b in pair]
    assert interleaved == [b.tolist() for b in BatchStream(Numbered(8), n_batches=8, **options)]
    halves = [
        [i for b in FixedBatches(Numbered(9), batch_size=2, limit=None, rank=r, world_size=2) for i in b.tolist()]
        for r in range(2)
    ]
    assert sorted(halves[0] + halves[1]) == list(range(9))


def test_limited_validation_spreads_over_the_split() -> None:
    chosen = [i for b in FixedBatches(Numbered(100), batch_size=3, limit=5) for i in b.tolist()]
    assert chosen == [0, 25, 50, 74, 99]
