"""How to measure the same again, and to render this again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8bench.codec import SCHEMA
from fp8bench.model import Run
from fp8bench.report.elements import Code, Element, Facts, Part, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.run_facts import commit_of, fact
from fp8bench.report.section import Section, sections

_VARIABLE = "env_"
_DEFAULT_STORE = ".fp8bench"


@sections.register("reproduce")
class Reproduce(Section):
    """The exact commands, what they ran with, and where the samples are."""

    name = "reproduce"
    summary = "commands, versions, settings, and where the samples are kept"
    rank = 900

    def build(self, material: Material) -> Part | None:
        elements: list[Element] = []
        for entry in material.entries:
            elements += [Text(entry.label, Tone.STRONG)] if entry.label else []
            elements += _run(entry.run)
        kept = [entry.run for entry in material.entries if entry.run.path]
        if kept:
            elements += [Text("This page again, from the samples:"), Code(_again(kept))]
        return Part(self.name, "Reproduce", tuple(elements)) if elements else None


def _again(runs: Sequence[Run]) -> str:
    """The command that renders the page from the store, with its folder where it is not the one that is looked in."""
    words = ["fp8bench", "report", *(run.id for run in runs)]
    stores = {Path(run.path).parent.parent.parent for run in runs if Path(run.path).parent.parent.name == "runs"}
    if len(stores) == 1 and stores != {Path(_DEFAULT_STORE)}:
        words += ["--store", str(stores.pop())]
    return shlex.join(words)


def _run(run: Run) -> Iterator[Element]:
    commands = [run.command, *(one.command for one in run.resumptions)]
    known = [command for command in commands if command]
    yield Code("\n".join(known)) if known else Text("The command is lost with the header of the file.", Tone.DOUBT)
    yield Facts(tuple(_facts(run)))


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    """Versions first; what is not known has no line."""
    names = (("fp8bench", "fp8bench"), ("torch", "torch"), ("numpy", "numpy"), ("Python", "python"))
    yield from ((title, fact(run, name)) for title, name in names if fact(run, name))
    if run.started:  # a header that is lost took the request with it
        yield "seed", str(run.request.seed)
        yield "threads", fact(run, "threads") or str(run.request.threads)
    if commit_of(run):
        yield "commit", f"{fact(run, 'commit')}{' with uncommitted changes' if run.environment.get('dirty') else ''}"
    if fact(run, "imports_sha256"):
        yield "code of --import", f"sha256 {fact(run, 'imports_sha256')}"
    for name, value in sorted(run.environment.facts.items()):
        if name.startswith(_VARIABLE):
            yield name.removeprefix(_VARIABLE), str(value)
    yield "samples", run.path or "this run was not stored"
    yield "format of the file", f"schema {SCHEMA}"
