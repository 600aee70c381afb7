"""How to measure it again: the command, what it ran with, and where the samples are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Environment, Resumption
from fp8bench.report.elements import Code, Facts, Text, Tone
from tests.materials import Made, built, of_kind, part
from tests.runs import gemm, transformer

ENVIRONMENT = Environment(
    {
        "fp8bench": "0.1.0", "torch": "2.13.0", "numpy": "2.3.1", "python": "3.11.7", "threads": 2,
        "commit": "0a1b2c3d4e5f6", "dirty": True, "imports_sha256": "abc", "env_OMP_NUM_THREADS": "2", "env_A": "1",
    }
)  # fmt: skip


def kept(path: str = ".fp8bench/runs/box/run.jsonl") -> Made:
    run, findings = gemm()
    return replace(run, path=path, environment=ENVIRONMENT), findings


def codes(*made: Made) -> list[str]:
    return [code.text for code in of_kind(part("reproduce", *made), Code)]


def test_command_settings_and_samples() -> None:
    (facts,) = of_kind(part("reproduce", kept()), Facts)
    assert dict(facts.pairs) == {
        "fp8bench": "0.1.0",
        "torch": "2.13.0",
        "numpy": "2.3.1",
        "Python": "3.11.7",
        "seed": "0",
        "threads": "2",
        "commit": "0a1b2c3d4e5f6 with uncommitted changes",
        "code of --import": "sha256 abc",
        "A": "1",
        "OMP_NUM_THREADS": "2",
        "samples": ".fp8bench/runs/box/run.jsonl",
        "format of the file": "schema 1",
    }
    assert codes(kept()) == ["fp8bench suite x", "fp8bench report 20260105-120000"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (".fp8bench/runs/box/run.jsonl", ""),
        ("my store/runs/box/run.jsonl", " --store 'my store'"),
        ("run.jsonl", ""),
    ],
)
def test_a_store_elsewhere_is_named(path: str, more: str) -> None:
    assert codes(kept(path))[-1] == f"fp8bench report 20260105-120000{more}"


def test_several_runs_are_rendered_together() -> None:
    run, findings = transformer()
    said = codes(kept(), (replace(run, id="other"), findings))
    assert said[-1] == "fp8bench report 20260105-120000 other"
    strong = [text.text for text in of_kind(part("reproduce", kept(), transformer()), Text) if text.tone is Tone.STRONG]
    assert strong == ["gemm", "transformer"]


def test_a_run_that_was_not_kept_cannot_be_rendered_again() -> None:
    run, findings = gemm()
    assert codes((run, findings)) == ["fp8bench suite x"]
    (facts,) = of_kind(part("reproduce", (run, findings)), Facts)
    assert dict(facts.pairs)["samples"] == "this run was not stored"


def test_a_run_gone_on_with_has_every_command() -> None:
    run, findings = kept()
    again = Resumption("2026-01-06", "fp8bench suite --resume 1", Environment({}))
    assert codes((replace(run, resumptions=(again,)), findings))[0] == "fp8bench suite x\nfp8bench suite --resume 1"


def test_a_lost_header_is_said_and_nothing_made_up() -> None:
    run, findings = kept()
    lost = replace(run, command="", started="", environment=Environment({}), devices=())
    found = part("reproduce", (lost, findings))
    assert found.elements[0] == Text("The command is lost with the header of the file.", Tone.DOUBT)
    (facts,) = of_kind(found, Facts)
    assert set(dict(facts.pairs)) == {"samples", "format of the file"}


def test_no_runs_have_nothing_to_reproduce() -> None:
    assert built("reproduce") is None
