"""The documentation site: its reference matches the code, and Sphinx, if installed, builds it without warnings."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from docs import reference
from fp8bench.cli.main import COMMANDS
from fp8bench.model import Label
from fp8bench.report.words.legend import WORDS_BY_LABEL

ROOT = Path(__file__).resolve().parents[2]


def lines() -> Iterator[Any]:
    """The lines of all stored test runs and of the sample."""
    stored = ROOT.glob("tests/golden/store*/**/runs/*box/*.jsonl")
    for path in (ROOT / "reports" / "sample" / "run.jsonl", *stored):
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    made = reference.run_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


@pytest.mark.slow
def test_the_schema_holds_for_stored_runs_and_for_nothing_else(schema: jsonschema.Draft202012Validator) -> None:
    """Rejects a digit replaced by a word, a missing key and an unknown status."""
    stored = list(lines())
    assert len(stored) > 100 and all(map(schema.is_valid, stored))
    record = next(line for line in stored if line.get("record", {}).get("timing"))
    for place, wrong in ((("status",), "fine"), (("case",), None), (("timing", "slots", 0, "wall_seconds"), "long")):
        broken = copy.deepcopy(record)
        inner = broken["record"]
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = wrong
        assert not schema.is_valid(broken), place
    assert schema.is_valid({**record, "record": {**record["record"], "a key of tomorrow": 1}})
    assert not schema.is_valid({"schema": 2, "header": stored[0]["header"]})


def test_every_label_has_a_remedy_and_every_command_a_page() -> None:
    assert set(WORDS_BY_LABEL) == set(Label) and all(all(words) for words in WORDS_BY_LABEL.values())
    made = dict(reference.pages())
    assert {f"command-{name}" for name in COMMANDS} | {"options", *reference.PAGES} == set(made)
    assert "`--precision-map" in made["command-suite"] and "$ fp8bench gate" in made["command-gate"]
    assert "## fp8bench history show" in made["command-history"]
    by_question = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"fp8bench {name} " not in by_question] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="the extra docs is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_it_is_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs import build

    monkeypatch.setattr(build, "BROWSERS", ())
    build.build(tmp_path / "site")
    for name in ("index.html", "searchindex.js", "docs/reference/labels.html", "gallery/training.html"):
        assert (tmp_path / "site" / name).is_file(), name
    listed = (tmp_path / "site" / "llms.txt").read_text(encoding="utf-8")
    for page in listed.split("](")[1:]:
        assert (tmp_path / "site" / page.partition(")")[0]).is_file() or "_sources" not in page
    whole = build.as_page
    monkeypatch.setattr(build, "GALLERY", ())
    monkeypatch.setattr(build, "as_page", lambda path: whole(path) + "\n[nowhere](nowhere.md)\n")
    with pytest.raises(SystemExit, match=r"not whole:[\s\S]*nowhere\.md"):
        build.build(tmp_path / "broken")
