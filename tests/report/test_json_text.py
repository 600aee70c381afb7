"""A run as one JSON document."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings

from fp8bench.codec import SCHEMA, decode, encode
from fp8bench.model import Finding, Measurement, Record, Run
from fp8bench.report.json_text import render
from tests.runs import gemm, measured, transformer, wild_runs


def strict(text: str) -> Any:
    """The document; Python's own words for what JSON has no word for are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("make", [measured, gemm, transformer])
def test_it_holds_the_whole_run(make: Any) -> None:
    """Header, records with every raw sample, and beside each record its finding: they come back as they were."""
    run, findings = make()
    text = render(run, findings)
    document = strict(text)
    assert text.isascii() and text.endswith("}\n") and text.count("\n") == 1
    assert document.pop("schema") == SCHEMA
    assert set(document) == {field.name for field in fields(Run)}
    assert decode(Run, document) == run
    for record, plain in zip(run.records, document["records"], strict=True):
        found = findings.get(record.case.id)
        assert (plain["finding"] is None) == (found is None)
        if found is not None:
            assert "case" not in plain["finding"]
            assert decode(Finding, {**plain["finding"], "case": plain["case"]}) == found


def test_what_json_has_no_word_for_is_text() -> None:
    run, findings = measured()
    measurement = Measurement("product_error", "ratio", (float("inf"), float("-inf"), float("nan")))
    run = replace(run, records=(replace(run.records[0], measurements=(measurement,)),))
    plain = strict(render(run, findings))["records"][0]
    assert plain["measurements"][0]["samples"] == ["inf", "-inf", "nan"]


def test_a_record_without_a_finding_has_none() -> None:
    run, _ = measured()
    assert {plain["finding"] for plain in strict(render(run, {}))["records"]} == {None}


def test_a_record_is_as_in_the_run_s_file() -> None:
    """With one key more."""
    run, findings = measured()
    for record, plain in zip(run.records, strict(render(run, findings))["records"], strict=True):
        del plain["finding"]
        assert plain == encode(record)
        assert decode(Record, plain) == record


@settings(max_examples=40)
@given(wild_runs())
def test_any_run_is_strict_json(wild: tuple[Run, dict[str, Finding]]) -> None:
    run, findings = wild
    assert len(strict(render(run, findings))["records"]) == len(run.records)
