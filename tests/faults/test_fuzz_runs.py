"""Thousands of run files that something happened to: each is refused with a sentence, or shown."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError
from fp8bench.model import Environment
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.data.run import run_document, run_rows
from fp8bench.report.terminal import run as text
from fp8bench.store.runs.run_file import find_incomplete_groups, load_run, start_run
from tests.counts import counts
from tests.faults import damage
from tests.older import without_sums
from tests.runs import measured


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A run file with real samples, skipped and failed cases, notes and an end."""
    run, _ = measured()
    writer = start_run(run, tmp_path_factory.mktemp("store"))
    for record in run.records:
        writer.append([record])
    writer.note("a note")
    writer.finish("finished")
    return without_sums(writer.path.read_bytes())  # a line with these is refused first


def shuffle(chance: random.Random, content: bytes) -> bytes:
    """Lines reordered, duplicated or missing."""
    lines = content.splitlines(keepends=True)
    return b"".join(chance.choices(lines, k=chance.randint(0, 2 * len(lines))))


def replace_values(chance: random.Random, content: bytes) -> bytes:
    lines = content.splitlines()
    for _ in range(chance.randint(1, 3)):
        number = chance.randrange(len(lines))
        lines[number] = damage.replace_value(chance, lines[number])
    return b"\n".join(lines) + b"\n"


MUTATIONS: tuple[damage.Mutation, ...] = (damage.flip, damage.cut, shuffle, replace_values, replace_values)


@counts(30, 2000)
def test_whatever_happened_to_a_run_file_it_is_refused_or_shown(count: int, whole: bytes, tmp_path: Path) -> None:
    chance = random.Random(20261121)
    path = tmp_path / "mutated.jsonl"
    refused = shown = 0
    for number in range(count):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        content = mutate(chance, whole)
        path.write_bytes(content)
        run = None
        with contextlib.suppress(StoreError):
            run = load_run(path)
        if run is None:
            refused += 1
            continue
        try:
            found = findings(run)
            outputs = (
                text.render(run, found),
                json_line(run_document(run, found)),
                csv_text(*run_rows([(run, found)])),
            )
            find_incomplete_groups(run)
        except Exception as error:
            kept = tmp_path / "failing.jsonl"
            kept.write_bytes(content)
            raise AssertionError(f"{type(error).__name__} ({mutate.__name__}, number {number})") from error
        shown += 1
        assert all(outputs) and isinstance(run.environment, Environment)
        json.loads(outputs[1])
    # About one in a hundred changes hits a required field; among a few hundred there may be none.
    assert shown > count / 2 and (count < 2000 or refused > count / 200), (refused, shown)
