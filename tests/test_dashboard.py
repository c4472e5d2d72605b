"""The offline page of a run, in a real browser, and the same layout for W&B."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_browser

from attnlimits import dashboard
from attnlimits.training import train


@pytest.fixture
def directory(compose_train: Callable, tiny_run: list[str], tmp_path: Path) -> Path:
    return train(compose_train([*tiny_run, "logger=csv", "normalizer=ssmax"]), tmp_path / "run").directory


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll('.card, h1, h2, .card h3, .card svg, .card .heat, .card .scale')];
  const apart = (a, b) =>
    a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
  const bad = [];
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    if (boxes[i].contains(boxes[j]) || boxes[j].contains(boxes[i])) continue;
    if (!apart(boxes[i].getBoundingClientRect(), boxes[j].getBoundingClientRect()))
      bad.push(boxes[i].textContent.slice(0, 40) + ' | ' + boxes[j].textContent.slice(0, 40));
  }
  return bad;
}"""


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_page_shows_heatmaps_without_overlap(browser: Any, directory: Path, tmp_path: Path, width: int) -> None:
    dashboard.main([str(directory)])
    page = browser.new_page(viewport={"width": width, "height": 900})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((directory / "dashboard.html").as_uri())
    assert asked == [(directory / "dashboard.html").as_uri()]  # nothing from elsewhere
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    titles = page.locator("h3").all_text_contents()
    assert any(title.startswith("entropy by layer and head") for title in titles)
    entropy = page.locator(".card", has_text="entropy by layer and head").first.locator(".cell")
    assert entropy.count() == 4
    sizes = [entropy.nth(i).bounding_box() for i in range(4)]
    assert all(box["width"] > 5 and box["height"] > 5 for box in sizes)
    picture = page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert len(picture) > 10_000
    page.close()


def test_page_says_what_the_files_say(directory: Path) -> None:
    text = dashboard.page(directory)
    for heading in ("Loss", "Vanishing", "Separability", "Gradients"):
        assert f"<h2>{heading}</h2>" in text
    assert "separability_n5 by layer and head, step 6" in text
    assert "normalizer ssmax, T 1.0, context 32, steps 6" in text
    assert "http" not in text


def test_page_of_a_run_without_heads(directory: Path) -> None:
    (directory / "heads.parquet").unlink()
    assert "did not measure attention" in dashboard.page(directory)


def test_no_run_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        dashboard.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: holds no metrics.csv")


def test_workspace_has_the_same_sections() -> None:
    available = ["val/loss", "attention/entropy", "attention/separability_n5", "gradients/norm", "heads/entropy"]
    sections = dashboard.workspace("me", "attnlimits", available).sections
    assert [section.name for section in sections] == ["Loss", "Vanishing", "Separability", "Gradients"]
    assert [len(section.panels) for section in sections] == [1, 2, 1, 1]
