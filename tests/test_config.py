"""The command line: what composes, and how a mistake is answered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PROJECT
from omegaconf import OmegaConf

import train as train_script
from attnlimits import cli
from attnlimits.config import TrainConfig, check
from attnlimits.normalizers import REGISTRY

OPTIONS = [
    f"{path.parent.name}={path.stem}"
    for path in sorted((PROJECT / "conf").glob("*/*.yaml"))
    if path.parent.name != "analysis"  # a group of analyze.py
]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_shipped_yaml_composes_and_resolves(compose_train: Callable, option: str) -> None:
    text = ["data.path=x.txt"] if option.startswith(("data=text", "experiment=")) else []
    cfg = compose_train([option, *text])
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    if cfg.model.path != "gpt2":  # whose positions are on the hub
        check(cfg)


def test_a_yaml_for_every_normalizer_and_none_without_one() -> None:
    assert {path.stem for path in (PROJECT / "conf" / "normalizer").glob("*.yaml")} == set(REGISTRY)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., str]:
    """``refused("T=0")``: run train.py's main with these overrides; the one line it answers."""

    def run(*overrides: str) -> str:
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
        with pytest.raises(SystemExit) as exit_:
            cli.launch(train_script.main, TrainConfig)
        assert exit_.value.code == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert list(folder.rglob("*")) == []
        return err

    return run


MISTAKES = {
    # key and value, then what the line must say
    ("TT=3",): ("TT", "did you mean T?"),
    ("+temprature=3",): ("temprature", "unknown key"),
    ("model.pth=x",): ("model.pth", "did you mean model.path?"),
    ("+model.pth=x",): ("model.pth", "did you mean model.path?"),
    ("trainer.max_step=3",): ("trainer.max_step", "did you mean trainer.max_steps?"),
    ("nomalizer=softmax",): ("nomalizer", "did you mean normalizer?"),
    ("normalizer=sofmax",): ("normalizer=sofmax", "did you mean softmax?", "sparsemax"),
    ("experiment=nope",): ("experiment=nope", "pretrain_mini"),
    ("T=abc",): ("T=abc", "a number"),
    ("T=[1,2]",): ("T=[1,2]", "a number"),
    ("T=null",): ("T=null", "must not be null"),
    ("T=0",): ("T=0.0", "> 0"),
    ("T=-1",): ("T=-1.0", "> 0"),
    ("T=nan",): ("T=nan", "finite"),
    ("T=inf",): ("T=inf", "finite"),
    ("context_length=1",): ("context_length=1", "between 2 and 64"),
    ("context_length=65",): ("context_length=65", "between 2 and 64"),
    ("context_length=12.5",): ("context_length=12.5", "a whole number"),
    ("data.batch_size=0",): ("data.batch_size=0", "> 0"),
    ("data.validation_fraction=1",): ("data.validation_fraction=1.0", "below 1"),
    ("data.kind=web",): ("data.kind=web", "war_and_peace"),
    ("data.path=x.txt",): ("data.path=x.txt", "use data=text"),
    ("data=text",): ("data.path=None", "a file, a glob"),
    ("data=text", "data.path=/nowhere/x.txt"): ("data.path=/nowhere/x.txt", "no such file"),
    ("trainer.max_epochs=1",): ("trainer.max_epochs=1", "exactly one"),
    ("trainer.precision=16",): ("trainer.precision=16", "bf16-mixed"),
    ("trainer.precision=16-mixed", "trainer.accelerator=cpu"): ("trainer.precision=16-mixed", "GPU"),
    ("optimizer.betas=[0.9]",): ("optimizer.betas=[0.9]", "two numbers"),
    ("optimizer.schedule_steps=0",): ("optimizer.schedule_steps=0", "or null"),
    ("model=scratch", "model.scratch.n_head=5"): ("model.scratch.n_embd=256", "a multiple of 5"),
    ("model=scratch", "model.scratch.vocab_size=100"): ("model.scratch.vocab_size=100", "above 256"),
    ("seed=-1",): ("seed=-1", "unseeded"),
    ("ckpt_path=/nowhere/last.ckpt",): ("ckpt_path=/nowhere/last.ckpt", "no such file"),
    ("+normalizer.T=0.3",): ("normalizer.T=0.3", "top-level T"),
    ("normalizer=ssmax", "normalizer.s=big"): ("normalizer.s=big", "float | null"),
    ("normalizer=ssmax", "+normalizer.offset=1"): ("normalizer.offset=1", "learnable, s"),
    ("normalizer=top_k", "normalizer.k=0"): ("normalizer.k=0", "at least 1"),
    ("normalizer=log_length", "normalizer.variant=cubic"): ("normalizer.variant=cubic", "yarn"),
    ("normalizer=softmax", "+normalizer._target_=nowhere.Mine"): ("normalizer._target_=nowhere.Mine", "imported"),
    ("callbacks.progress.every=3",): ("callbacks.progress.every", "unknown key"),
    ("+callbacks.progress.every=3",): ("callbacks.progress", "every"),
    ("+callbacks.mine={_target_:nowhere.Mine}",): ("callbacks.mine", "nowhere"),
    ("model.path=./nowhere",): ("model.path=./nowhere", "no such folder"),
    ("model=gpt2",): ("model.path=gpt2", "local directory"),
    ("logger=wandb_online",): ("logger.offline=False", "wandb login"),
}


@pytest.mark.parametrize("overrides", MISTAKES, ids=" ".join)
def test_mistake_is_one_line_and_leaves_nothing(
    refused: Callable[..., str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    model = [] if any(o.startswith("model") for o in overrides) else [f"model.path={tiny_model}", "logger=csv"]
    defaults = [o for o in [*model, "context_length=32"] if o.split("=")[0] not in {x.split("=")[0] for x in overrides}]
    line = refused(*defaults, *overrides)
    for part in MISTAKES[overrides]:
        assert part in line, line


def test_help_answers_without_importing_torch() -> None:
    """Torch and Lightning are what would make it slow."""
    code = (
        "import sys, runpy; sys.argv = ['train.py', '--help']\ntry: runpy.run_path('train.py', run_name='__main__')\n"
    )
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "context_length: 256" in done.stdout
