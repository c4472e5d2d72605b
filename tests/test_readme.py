"""The README's commands, as they stand there, on something small."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import PROJECT
from omegaconf import OmegaConf

import analyze as analyze_script
import train as train_script
from attnlimits import cli
from attnlimits.config import AnalyzeConfig, TrainConfig
from attnlimits.normalizers import REGISTRY
from attnlimits.training import validation_rows

README = (PROJECT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines() if line.strip()]
TRAIN = [command[2:] for command in COMMANDS if command[:2] == ["python", "train.py"]]
ANALYZE = [command[2:] for command in COMMANDS if command[:2] == ["python", "analyze.py"]]
OTHERS = [command for command in COMMANDS if command[:2] not in (["python", "train.py"], ["python", "analyze.py"])]
SMALL_KEYS = ("trainer.max_steps", "trainer.validation_blocks", "trainer.devices", "context_length")
SMALL = ["trainer.max_steps=2", "trainer.validation_blocks=2", "data.batch_size=1", "trainer.devices=1"]


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path, novel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the README's paths exist."""
    folder = tmp_path / "here"
    (folder / "books").mkdir(parents=True)
    (folder / "books" / "one.txt").write_text(novel.read_text() * 8)
    (folder / "book.txt").write_text(novel.read_text())
    monkeypatch.chdir(folder)
    return folder


def run_train(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of train.py's main with these arguments."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    cli.launch(train_script.main, TrainConfig)
    return max(Path("outputs").glob("*/*"), key=lambda path: path.stat().st_mtime)


def localised(command: list[str], tiny_model: Path) -> list[str]:
    """The command with what a test does not have replaced: the hub, Gutenberg, a W&B login, two minutes."""
    local = f"model.path={tiny_model} data=text data.path=book.txt"
    replaced = {"model=gpt2": f"model.path={tiny_model}", "data=war_and_peace": "data=text data.path=book.txt"}
    replaced |= {"experiment=paper": f"experiment=paper {local}"}
    replaced |= {"model.path=path/to/gpt2": f"model.path={tiny_model}", "logger=wandb_online": "logger=csv"}
    words = " ".join(replaced.get(word, word) for word in command).split()
    keys = {word.split("=")[0] for word in words}
    tiny = [] if "context_length" in keys or not any("tiny" in word for word in words) else ["context_length=32"]
    return [*words, *tiny, *(option for option in SMALL if option.split("=")[0] not in keys - {"trainer.max_steps"})]


@pytest.mark.parametrize("command", [c for c in TRAIN if "--help" not in c and "ckpt_path" not in str(c)], ids=" ".join)
def test_train_command_runs(here: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    words = [word for word in localised(command, tiny_model) if word != "trainer.max_steps=500"]
    directory = run_train(words, monkeypatch)
    cfg = OmegaConf.load(directory / "config.yaml")
    for word in command:
        key, value = word.split("=", 1)
        if key in ("T", "context_length"):
            assert str(OmegaConf.select(cfg, key)) == value
        if key == "normalizer":
            assert cfg.normalizer.name == value
    assert (directory / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ANALYZE, ids=" ".join)
def test_analyze_command_runs(
    here: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    words = localised(command, tiny_model)
    if "ckpt_path" in str(command):
        trained = run_train(localised([f"model.path={tiny_model}", "logger=csv"], tiny_model), monkeypatch)
        words = [word.replace("outputs/<date>/<run>", str(trained)) for word in words]
    small = ["context_length=32", "analysis.passages=1", "analysis.critical_n=[1,5]"]
    kept = [word for word in words if word.split("=")[0] not in SMALL_KEYS]
    monkeypatch.setattr(sys, "argv", ["analyze.py", *kept, *small])
    cli.launch(analyze_script.main, AnalyzeConfig)
    directory = max(Path("outputs").glob("*/*"), key=lambda path: path.stat().st_mtime)
    assert (directory / "report.html").is_file()
    for word in command:
        key, value = word.split("=", 1)
        if key == "T":
            assert str(OmegaConf.load(directory / "config.yaml").T) == value
        if key == "analysis":
            assert list(OmegaConf.load(directory / "config.yaml").analysis.experiments) == [value]


def test_resume_command_goes_on_in_its_directory(here: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = [c for c in TRAIN if "ckpt_path" in str(c)]
    first = run_train(localised([f"model.path={tiny_model}", "logger=csv"], tiny_model), monkeypatch)
    words = [word.replace("outputs/<date>/<run>", str(first)) for word in command]
    second = run_train([*words, "trainer.max_steps=3"], monkeypatch)
    assert second == first
    assert [row["step"] for row in validation_rows(first / "metrics.csv")] == [0, 2, 3]


def test_every_other_command_is_known() -> None:
    """Those that a test elsewhere runs: make test is how this file is run, the benchmark has a test, sync too."""
    makefile = (PROJECT / "Makefile").read_text()
    for command in OTHERS:
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE)
        else:
            known = (["wandb", "sync"], ["python", "-m", "attnlimits.dashboard"])
            is_benchmark = command[0] == "python" and (PROJECT / command[1]).is_file()
            assert is_benchmark or any(command[: len(words)] == words for words in known)


@pytest.mark.slow
def test_benchmark_command_writes_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a toy shape: what is tested is the script, not the machine."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import training_step
    from transformers import GPT2Config

    monkeypatch.setattr(training_step, "GPT2Config", lambda: GPT2Config(n_layer=1, n_embd=32, n_head=2))
    monkeypatch.setattr(training_step, "peak_mb", lambda variant, length: 1.0)
    figures = training_step.measure(["softmax", "ssmax", "sparsemax"], {256: 1, 1024: 1})
    wanted = {f"softmax_time_vs_sdpa_{length}" for length in (256, 1024)} | {"softmax_memory_vs_sdpa_1024"}
    assert wanted | {"ssmax_time_vs_sdpa_1024", "sparsemax_time_vs_sdpa_1024"} <= set(figures)


@pytest.mark.slow
def test_other_benchmarks_write_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import normalizers
    import probe_overhead
    from transformers import GPT2Config

    monkeypatch.setattr(normalizers, "SHAPE", (2, 16, 16))
    monkeypatch.setattr(normalizers, "WAYS", {"compiled": "off", "eager": "off"})  # no time to compile
    monkeypatch.setattr(normalizers, "peak_mb", lambda contestant, kind: 1.0)
    found = normalizers.measure(rounds=1)
    for name in ("sparsemax", "entmax15"):
        for figure in ("compiled_vs_softmax", "eager_vs_softmax", "compiled_vs_entmax", "eager_vs_entmax"):
            assert found[f"{name}_{figure}"] > 0
        assert {f"{name}_max_error", f"{name}_memory_vs_softmax"} <= set(found)
    assert {f"{name}_vs_softmax" for name in REGISTRY} - {"sparsemax_vs_softmax", "entmax15_vs_softmax"} <= set(found)

    monkeypatch.setattr(probe_overhead, "LENGTHS", (32, 64))
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2}
    monkeypatch.setattr(probe_overhead, "GPT2Config", lambda **_: GPT2Config(**small, n_positions=1024))
    assert {"training_slowdown", "probe_vs_step"} <= set(probe_overhead.cost(rounds=1))
    assert "probe_growth_exponent" in probe_overhead.growth(rounds=1)


@pytest.mark.slow
def test_benchmark_of_the_analysis_writes_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one layer and short passages; the two versions must agree."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import analysis as benchmark

    monkeypatch.setattr(benchmark, "LAYERS", 1)
    monkeypatch.setattr(benchmark, "LENGTH", 48)
    monkeypatch.setattr(benchmark, "LENGTHS", (16, 32))
    found = benchmark.cost(rounds=1) | benchmark.growth(rounds=1)
    assert {"five_experiments_seconds", "vs_straightforward", "length_growth_exponent"} <= set(found)
    assert found["agreement"] < 1e-3


@pytest.mark.slow
def test_default_run_lowers_perplexity_by_a_fifth(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make train`'s run, shortened: the embedded model on Python's reference."""
    directory = run_train(["trainer.max_steps=40", "trainer.validation_blocks=16", "logger=csv"], monkeypatch)
    rows = validation_rows(directory / "metrics.csv")
    assert rows[-1]["val/perplexity"] < 0.8 * rows[0]["val/perplexity"]


def test_several_runs_each_get_their_own_directory(
    here: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = localised([f"model.path={tiny_model}", "logger=csv"], tiny_model)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "normalizer=softmax,sparsemax", "T=0.5,1", *options])
    cli.launch(train_script.main, TrainConfig)
    configs = [OmegaConf.load(path) for path in sorted(Path("outputs").glob("*/*/*/config.yaml"))]
    assert [(cfg.normalizer.name, cfg.T) for cfg in configs] == [
        *(("softmax", 0.5), ("softmax", 1.0), ("sparsemax", 0.5), ("sparsemax", 1.0))
    ]
