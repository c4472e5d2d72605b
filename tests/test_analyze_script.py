"""analyze.py as a user runs it: what it writes, what the page shows in a browser, and how mistakes are answered."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import PROJECT, needs_browser
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from support.wandb_record import finished_runs

import analyze as analyze_script
from attnlimits import cli, config
from attnlimits.analysis import run as analysis
from attnlimits.analysis.claims import CLAIMS
from attnlimits.analysis.run import Result
from attnlimits.config import AnalyzeConfig, check_analysis

DOCS = (PROJECT / "docs" / "analysis.md").read_text(encoding="utf-8")
OPTIONS = [
    f"{path.parent.name}={path.stem}"
    for group in ("analysis", "data", "experiment", "logger", "model", "normalizer")
    for path in sorted((PROJECT / "conf" / group).glob("*.yaml"))
    if not path.stem.startswith("pretrain")  # those are of train.py
]
SMALL = ["context_length=16", "analysis.passages=2", "analysis.top_n=[1,3]", "analysis.critical_n=[1,2,4]"]
SMALL += ["analysis.separability_n=[1,2,4]", "analysis.verdict_n=4", "analysis.length_n=2", "analysis.lengths=[4,8]"]


def composed(*overrides: str) -> Any:
    config.register()
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        return compose("analyze", overrides=list(overrides))


@pytest.fixture
def small(tiny_model: Path, novel: Path) -> list[str]:
    return [f"model.path={tiny_model}", "data=text", f"data.path={novel}", *SMALL]


@pytest.fixture
def analysed(small: list[str], tmp_path: Path) -> Callable[..., Result]:
    """``analysed("T=0.5")``: a small run of analyze.py's work, its report in a directory of its own."""

    def done(*overrides: str, directory: str = "analysis") -> Result:
        base = [o for o in [*small, "logger=csv"] if o.split("=")[0] not in {x.split("=")[0] for x in overrides}]
        return analysis.run(composed(*base, *overrides), tmp_path / directory, overrides)

    return done


@pytest.mark.parametrize("option", OPTIONS)
def test_every_shipped_yaml_composes_with_the_analysis(option: str) -> None:
    cfg = composed(option, *(["data.path=x.txt"] if option == "data=text" else []))
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    if cfg.model.path != "gpt2":  # whose positions are on the hub
        check_analysis(cfg)


def test_settings_in_the_yaml_are_those_of_the_library() -> None:
    from attnlimits.analysis import Settings

    assert Settings.of(config.plain(composed().analysis), seed=1) == Settings()


# -------------------------------------------------------------------------------------------------------- the report


def test_report_holds_every_table_and_figure(analysed: Callable[..., Result]) -> None:
    result = analysed()
    tables = {path.stem for path in (result.directory / "tables").glob("*.parquet")}
    assert tables == {"results", "curves", "critical", "audit", "heads", "claims"}
    for name in tables:
        table = pd.read_parquet(result.directory / "tables" / f"{name}.parquet")
        assert len(table) == len(pd.read_csv(result.directory / "tables" / f"{name}.csv")) > 0
        for column in table.columns:
            assert f"`{re.sub(r'_n[0-9]+$', '', column)}`" in DOCS or column in ("distance_n2",), column
    names = {path.stem for path in (result.directory / "figures").glob("*.svg")}
    assert names == {*config.plain(composed().analysis.experiments), "heads"}
    assert names == {path.stem for path in (result.directory / "figures").glob("*.png")}
    summary = json.loads((result.directory / "summary.json").read_text())
    assert summary["exit_reason"] == "completed"
    assert len(summary["claims"]) == len(CLAIMS)
    assert (summary["rows a head"], summary["L"], summary["passages"]) == (32, 16, 2)
    figure = (result.directory / "figures" / "separability.svg").read_text()
    assert "normalizer softmax, T 1.0, L 16, passages 2" in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", figure))


def test_everything_in_a_report_is_documented(analysed: Callable[..., Result]) -> None:
    found = analysed().analysis
    for quantity in found.results["quantity"].unique():
        assert f"`{quantity}`" in DOCS, quantity
    for statement in found.audit["statement"].unique():
        assert f"| `{statement}` |" in DOCS, statement
    verdicts = set(found.claims["verdict"]) | {"vacuous", "not measured", "reproduced"}
    for word in verdicts - {"not reproduced"}:
        assert word in DOCS, word


def test_rules_are_those_of_the_document() -> None:
    from attnlimits.analysis import audit, claims

    assert f"on {claims.VACUOUS:.0%}".replace("%", " %") in DOCS
    assert f"median of {claims.LOOSE:.0f} or more" in DOCS
    assert "between {} and {}".format(*claims.LINEAR) in DOCS
    assert "{} to {} times".format(*claims.CLOSE) in DOCS
    assert f"{claims.PAPER_CRITICAL / 2} L to {claims.PAPER_CRITICAL * 2} L" in DOCS
    assert "{:.2f} to {:.2f}".format(*claims.PAPER_PLATEAU) in DOCS
    assert f"N >= {claims.PLATEAU_FROM}" in DOCS
    assert f"at most {claims.VANISHING_SLOPE}" in DOCS
    assert f"below {claims.STEADY_SLOPE}" in DOCS
    assert (audit.TOLERANCE, audit.RESOLUTION) == (1e-9, 1e-7)


def test_default_model_shows_what_the_paper_gets_wrong(tmp_path: Path) -> None:
    """gpt2-mini on its default text, shortened."""
    options = ["context_length=128", "analysis.passages=1", "logger=csv", "analysis.critical_n=[5,20]"]
    found = analysis.run(composed(*options), tmp_path / "analysis").analysis.claims.set_index("claim")["verdict"]
    assert found["The Jacobian's norm is at most min(1/(4T), sqrt 2)"] == "violated"
    assert found["Provable: it is at most 1/(2T)"].startswith("holds")
    assert found["d~ of the top N is at most its bound"].startswith("holds")
    assert found["Provable: d~ is (n-N) ||s|| up to one vector"].startswith("holds")
    assert found["For fixed N, E d~ tends to sum ||a_i x_i||"] == "violated"


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_opens_offline_with_every_figure(
    browser: Any, analysed: Callable[..., Result], tmp_path: Path, width: int, scheme: str
) -> None:
    report = analysed().directory / "report.html"
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(report.as_uri())
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figures = page.locator("figure svg")
    assert figures.count() == len(list((report.parent / "figures").glob("*.svg")))
    for i in range(figures.count()):
        box = figures.nth(i).bounding_box()
        assert box["width"] > 300
        assert box["height"] > 150
    owners = "[...document.querySelectorAll('figure [id]')].map(e => [e.id, e.closest('figure').id])"
    pairs = {tuple(pair) for pair in page.evaluate(owners)}
    assert len({identity for identity, _ in pairs}) == len(pairs)  # no figure paints with another's gradients
    ink = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    assert ink == ("rgb(28, 35, 48)" if scheme == "light" else "rgb(230, 233, 239)")
    assert page.locator(".claim").count() == len(CLAIMS)
    page.locator("summary").click()
    assert page.locator("details table tr").count() > 20
    page.close()


def test_same_pictures_and_tables_go_to_wandb(analysed: Callable[..., Result]) -> None:
    directory = analysed("logger=wandb").directory
    (record,) = finished_runs(directory / "wandb")
    assert record.exit_code == 0
    logged = {key for row in record.history for key in row if key.startswith("analysis/")}
    pictures = {f"analysis/{path.stem}" for path in (directory / "figures").glob("*.png")}
    assert pictures | {f"analysis/{name}_table" for name in ("claims", "audit", "heads", "curves")} <= logged


def test_one_experiment_alone(analysed: Callable[..., Result]) -> None:
    result = analysed("analysis=separability")
    assert set(result.analysis.results["experiment"]) == {"separability"}
    assert {path.stem for path in (result.directory / "figures").glob("*.png")} == {"separability", "heads"}
    assert "not measured" in set(result.analysis.claims["verdict"])


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["checkpoints/last.ckpt", "model"])
def test_checkpoint_keeps_its_normalizer_and_temperature(
    run: Callable[..., Any], analysed: Callable[..., Result], kind: str
) -> None:
    trained = run("normalizer=ssmax", "T=0.5").directory
    result = analysed(f"ckpt_path={trained / kind}")
    assert (result.analysis.normalizer, result.analysis.T) == ("ssmax", 0.5)
    assert OmegaConf.load(result.directory / "config.yaml").normalizer.name == "ssmax"
    colder = analysed(f"ckpt_path={trained / kind}", "T=0.1", directory="colder")
    assert (colder.analysis.normalizer, colder.analysis.T) == ("ssmax", 0.1)
    other = analysed(f"ckpt_path={trained / kind}", "normalizer=sparsemax", directory="other")
    assert (other.analysis.normalizer, other.analysis.T) == ("sparsemax", 0.5)


def test_checkpoint_is_analysed_with_what_it_has_learnt(
    run: Callable[..., Any], analysed: Callable[..., Result]
) -> None:
    """A learned parameter of the normalizer changes the weights that are analysed, a colder T does not reset it."""
    trained = run("normalizer=ssmax").directory
    weights = trained / "model" / "normalizer.safetensors"
    state = load_file(weights)
    before = analysed(f"ckpt_path={trained / 'model'}").analysis.heads["entropy"]
    save_file({key: value * 0 for key, value in state.items()}, weights)
    for typed in ([], ["T=0.5"]):
        flat = analysed(f"ckpt_path={trained / 'model'}", *typed, directory=f"flat{len(typed)}").analysis.heads[
            "entropy"
        ]
        assert flat.to_numpy() == pytest.approx(1.0)  # s = 0: every row is uniform
    assert before.mean() < 1 - 1e-6


def test_plain_directory_as_a_checkpoint(analysed: Callable[..., Result], tiny_model: Path) -> None:
    as_checkpoint = analysed(f"ckpt_path={tiny_model}", "normalizer=sparsemax")
    as_model = analysed("normalizer=sparsemax", directory="as_model")
    pd.testing.assert_frame_equal(as_checkpoint.analysis.results, as_model.analysis.results)


# ---------------------------------------------------------------------------------------------------------- mistakes


@pytest.fixture
def refused(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., str]:
    """``refused("T=0")``: run analyze.py's main with these overrides; the one line it answers."""

    def answer(*overrides: str) -> str:
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        keys = {override.split("=")[0] for override in overrides}
        base = [option for option in [*small, "logger=csv"] if option.split("=")[0] not in keys]
        monkeypatch.setattr(sys, "argv", ["analyze.py", *base, *overrides])
        with pytest.raises(SystemExit) as exit_:
            cli.launch(analyze_script.main, AnalyzeConfig)
        assert exit_.value.code == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert list(folder.rglob("*")) == []
        return err

    return answer


MISTAKES = {
    ("analysis=separabilty",): ("analysis=separabilty", "did you mean separability?"),
    ("analysis.topn=[1]",): ("analysis.topn", "did you mean analysis.top_n?"),
    ("trainer.max_steps=3",): ("trainer", "unknown key"),
    ("+new=1",): ("new", "unknown key"),
    ("T=0",): ("T=0.0", "> 0"),
    ("context_length=3",): ("context_length=3", "between 4 and 64"),
    ("context_length=65",): ("context_length=65", "between 2 and 64"),
    ("analysis.passages=0",): ("analysis.passages=0", "> 0"),
    ("analysis.passages=9999",): ("analysis.passages=9999", "at most", "blocks of 16 tokens"),
    ("analysis.top_n=[0]",): ("analysis.top_n=[0]", "at least 1"),
    ("analysis.temperatures=[]",): ("analysis.temperatures=[]", "at least one"),
    ("analysis.temperatures=[0.1,-1]",): ("analysis.temperatures=[0.1, -1.0]", "> 0"),
    ("analysis.ks_level=2",): ("analysis.ks_level=2.0", "below 1"),
    ("analysis.representation=key",): ("analysis.representation=key", "value, hidden, embedding"),
    ("analysis.experiments=[one]",): ("analysis.experiments=one", "vanishing"),
    ("ckpt_path=/nowhere",): ("ckpt_path=/nowhere", "no such file"),
    ("normalizer=sofmax",): ("normalizer=sofmax", "did you mean softmax?"),
}


@pytest.mark.parametrize("overrides", MISTAKES, ids=" ".join)
def test_mistake_is_one_line_and_leaves_nothing(refused: Callable[..., str], overrides: tuple[str, ...]) -> None:
    line = refused(*overrides)
    for part in MISTAKES[overrides]:
        assert part in line, line


def test_nan_in_a_checkpoint_is_refused_by_name(refused: Callable[..., str], tiny_model: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tiny_model, spoilt)
    state = load_file(spoilt / "model.safetensors")
    state["transformer.h.0.mlp.c_fc.weight"][0, 0] = torch.nan
    save_file(state, spoilt / "model.safetensors", metadata={"format": "pt"})
    line = refused(f"model.path={spoilt}")
    assert "transformer.h.0.mlp.c_fc.weight holds NaN or inf" in line
    assert f"model.path={spoilt}" in line


def test_interrupted_analysis_says_so(
    analysed: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnlimits.analysis.run.analyze", stop)
    with pytest.raises(SystemExit) as exit_:
        analysed()
    assert exit_.value.code == 130
    assert json.loads((tmp_path / "analysis" / "summary.json").read_text()) == {"exit_reason": "interrupted"}


def test_help_answers_without_importing_torch() -> None:
    code = "import sys, runpy; sys.argv = ['analyze.py', '--help']\n"
    code += "try: runpy.run_path('analyze.py', run_name='__main__')\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ks_level: 0.01" in done.stdout
