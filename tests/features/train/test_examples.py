"""The files in examples/: each can be planned unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Say
from tests.counts import for_each
from tests.trainings import write_text

EXAMPLES = Path(__file__).parents[3] / "examples"
NEEDS_ITS_BASE = "fine-tuning-2-tune"
# Brings its own model and batches, whose path is relative to the repository.
WITH_MODEL = {"outlier-channels"}


@pytest.fixture
def plan(fp8bench: Say, store: Path, local: None) -> Say:
    usual = "--data", str(write_text())

    def train(name: str, *words: str) -> tuple[int, str, str]:
        data = () if name in WITH_MODEL else usual
        return fp8bench("train", "--config", str(EXAMPLES / f"{name}.yaml"), *data, *words)

    return train


@pytest.mark.slow
@for_each("name", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_an_example_has_a_plan_and_says_what_it_asks(name: str, plan: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in WITH_MODEL:
        monkeypatch.chdir(EXAMPLES.parent)
    if name == NEEDS_ITS_BASE:
        assert plan("fine-tuning-1-base", "--steps", "2", "--keep", "1")[0] == 0
    code, out, err = plan(name, "--dry-run")
    assert (code, err) == (0, "") and "candidate" in out and "skipped" not in out
    text = (EXAMPLES / f"{name}.yaml").read_text()
    assert f"fp8bench train --config examples/{name}.yaml" in text
    assert ("# Answer" in text) == (text.splitlines()[0].endswith("?"))
