"""advise from words to tables, files and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.cli.option_types import precision_map
from fp8bench.features.advise.job import load_checks
from fp8bench.features.sensitivity.job import kept
from fp8bench.model import Environment
from tests.advised import FP8, group, run
from tests.commands import Say
from tests.counts import for_each
from tests.features.advise.test_rules import study
from tests.kept import keep


def test_a_run_and_its_studies(store: Path, fp8bench: Say) -> None:
    """A route comes with a map that --precision-map takes."""
    keep(run(group(fp8=FP8)), store)
    code, _, err = fp8bench("advise", "last", "--write-map", "map.txt")
    assert code == 2 and "no layer of the run" in err and not Path("map.txt").exists()
    kept(study(0.1, 0.005), store)
    (store / "sensitivity" / "torn.json").write_text("{")
    code, out, _ = fp8bench("advise", "last", "--write-map", "map.txt", "--md", "advice.md")
    assert code == 0 and "torn.jsonisnostudy" in "".join(out.split()) and "--precision-map map.txt" in out
    assert precision_map("map.txt") == (("head", "bf16"),)
    assert "Does this device multiply in it? | ▲ yes |" in Path("advice.md").read_text()


@for_each(
    ("words", "error"),
    [
        ([], "no run was named"),
        (["last"], "no runs"),
        (["--score", "last"], "leave the run"),
        (["last", "--least", "100"], "a percentage"),
        (["last", "--check", "0"], "a whole number from 1"),
        (["last", "--write-map", "."], "it is a directory"),
        *((["last", f"--price={word}"], "no price of an hour") for word in ("free", "0", "-1/h", "inf")),
    ],
)
def test_bad_words(words: list[str], error: str, store: Path, fp8bench: Say) -> None:
    code, _, err = fp8bench("advise", *words)
    assert code == 2 and error in err


def test_another_run_answers_only_from_the_same_machine(store: Path, fp8bench: Say) -> None:
    first = run(group(fp8=FP8))
    keep(replace(first, id="aaaa"), store)
    other = replace(first, id="bbbb", started="2026-01-05T13:00:00Z", environment=Environment({"machine": "another"}))
    keep(other, store)
    code, _, err = fp8bench("advise", "aaaa", "--beside", "bbbb")
    assert code == 2 and "its machine is another" in err
    assert fp8bench("advise", "aaaa", "--beside", "aaaa")[0] == 0


def test_a_price_without_a_training(store: Path, fp8bench: Say) -> None:
    """The table says what is missing."""
    keep(run(group(fp8=FP8)), store)
    code, out, _ = fp8bench("advise", "last", "--price", "2.50/h")
    assert code == 0 and "no training was named (--training)" in out
    (cost,) = json.loads(fp8bench("advise", "last", "--price", "2.5", "--json")[1])["costs"]
    assert (cost["mode"], cost["time"], cost["money"]) == ("fp8", None, None)
    assert not json.loads(fp8bench("advise", "last", "--json")[1])["costs"]
    code, _, err = fp8bench("advise", "last", "--training", "last")
    assert code == 2 and "no training 'last'" in err


@pytest.mark.slow
@pytest.mark.usefixtures("short_slots")
def test_what_is_predicted_is_measured(store: Path, fp8bench: Say) -> None:
    """bf16 against fp32 on this processor: whatever came of it is kept beside the prediction, and scored."""
    words = ("suite", "gemm", "--dtypes", "fp32,bf16", "--set", "shape=512", "--rounds", "24", "--no-report")
    assert fp8bench(*words)[0] == 0
    code, out, _ = fp8bench("advise", "last", "--check", "1", "--json")
    if code == 2:
        pytest.skip("the machine was too busy for a verdict on the first run")
    (check,) = json.loads(out)["checked"]
    found, troubles = load_checks(store)
    assert not troubles and len(found) == 1 and check["run"] == found[0].run != found[0].advised
    assert (code == 3) == (found[0].measured is None) and bool(found[0].why) == (found[0].measured is None)
    code, out, _ = fp8bench("advise", "--score", "--json")
    score = json.loads(out)
    assert code == 0 and score["checks"] == (found[0].hit is not None) and score["hits"] == (found[0].hit is True)
