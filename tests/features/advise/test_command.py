"""advise from words to tables, files and exit codes."""

from __future__ import annotations

from pathlib import Path

from fp8bench.features.sensitivity.job import store_study
from tests.advised import FP8, group, run
from tests.commands import Say
from tests.counts import for_each
from tests.features.advise.test_advice import study
from tests.kept import keep


def test_advice_uses_a_run_and_its_studies(store: Path, fp8bench: Say) -> None:
    keep(run(group(fp8=FP8)), store)
    code, _, err = fp8bench("advise", "last", "--training", "last")
    assert code == 2 and "no training 'last'" in err
    store_study(study(0.1, 0.005), store)
    (store / "sensitivity" / "torn.json").write_text("{")
    code, out, _ = fp8bench("advise", "last", "--md", "advice.md")
    told = "".join(out.split())
    assert code == 0 and "torn.jsonisnotastudy" in told and "--precision-maphead=bf16" in told
    assert "Is it native on this device? | ▲ yes |" in Path("advice.md").read_text()


def test_commands_that_measure_more_need_the_store_of_the_run(store: Path, tmp_path: Path, fp8bench: Say) -> None:
    for where in (store, tmp_path / "elsewhere"):
        keep(run(group(fp8=FP8)), where)
        _, out, _ = fp8bench("advise", "last", "--store", str(where))
        assert (f"--dtypes bf16,fp8 --seeds 5 --store {where}" in " ".join(out.split())) == (where != store)


@for_each(
    ("words", "error"),
    [
        ([], "required: RUN"),
        (["last"], "no runs"),
        (["last", "--least", "100"], "a percentage"),
    ],
)
def test_bad_arguments_are_refused(words: list[str], error: str, store: Path, fp8bench: Say) -> None:
    code, _, err = fp8bench("advise", *words)
    assert code == 2 and error in err
