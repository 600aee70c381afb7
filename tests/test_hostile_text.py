"""Foreign text with terminal escapes, bidi controls or spreadsheet formulas is never passed on."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.cli.progress import LiveLine
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.features.gate.judging import GateVerdict as GateVerdict
from fp8bench.features.gate.judging import judge_first_look
from fp8bench.features.gate.view import render_junit
from fp8bench.model import Comparison, Direction, Evidence
from fp8bench.report.comparisons import comparison_rows
from fp8bench.report.data.plain import csv_text
from fp8bench.report.elements import Code, Column, Field, NameValuePairs, Page, Part, Table, Text, TextList
from fp8bench.report.page import html, markdown
from fp8bench.report.terminal.layout import render
from tests.commands import Say
from tests.own_suites import forgotten

# A window title, a colour, a carriage return, a bell, C1, a bidi isolate and an override.
NASTY = "=x\x1b]0;owned\x07 \x1b[31mred\r\x9b2J \u202egnp.exe\u202c \u2066a\u2069 \u200fb"
SUITE = """
from fp8bench.suites import Axis, Level, Support, Work, Workload, whole_number, workloads

NASTY = {nasty!r}

@workloads.register("hostile")
class Hostile(Workload):
    name = "hostile"
    summary = NASTY

    def axes(self, facts):
        return (Axis("n", NASTY, ("8",), whole_number(low=1)),)

    def work(self, params):
        return Work(1.0)

    def support(self, params, precision, facts):
        return Support(Level.REFUSED, NASTY) if precision.name == "fp16" else precision.support(facts)

    def prepare(self, setup):
        return setup.case.precision

    def step(self, state, phase):
        if state == "bf16":
            raise RuntimeError(NASTY)
        sum(range(100))

    def error(self, setup):
        return {{f"{{NASTY}}_error": 0.5, "=cmd|calc!A1_error": 0.25}}
"""


def obeyed(text: str, *allowed: str) -> set[str]:
    """Characters other than letters, signs and line ends."""
    return {letter for letter in text if not letter.isprintable()} - {"\n", *allowed}


@pytest.mark.slow
def test_a_real_suite_that_says_it_everywhere(store: Path, fp8bench: Say) -> None:
    Path("hostile.py").write_text(SUITE.format(nasty=NASTY))
    words = "suite ./hostile.py --dtypes fp32,bf16,fp16 --rounds 2 --no-energy --no-isolation"
    files = "--explain --md p.md --html p.html --csv rows.csv"
    with forgotten(Path.cwd()):
        said = [fp8bench(*words.split(), *files.split())]
        lines = ("list ./hostile.py", "show last", "show last --csv -", "history list --runs")
        said += [fp8bench(*line.split()) for line in lines] + [fp8bench("show", NASTY), fp8bench("list", NASTY)]
    assert [code for code, _, _ in said] == [3, 0, 0, 0, 0, 2, 2], said
    assert "owned" in said[0][1] and "red" in said[0][1] and "owned" in said[1][1] and "owned" in said[5][2]
    for _, out, err in said:
        assert not obeyed(out) and not obeyed(err)
    for file in (Path("rows.csv"), Path("p.md"), next(store.glob("reports/*/results.csv"))):
        assert not obeyed(file.read_text()), file
    assert not obeyed(Path("p.html").read_text(), "\t", "\u00a0", "\ufffd")
    rows = list(csv.reader(Path("rows.csv").read_text().splitlines()))
    cells = []
    for row in rows:
        cells += [cell for cell in row if "cmd|calc" in cell or "owned" in cell]
    assert len(cells) > 3 and not [cell for cell in cells if cell[0] in "=+-@"]


def comparison(**changes: object) -> Comparison:
    made = Comparison(
        f"{NASTY}[m=1]@cpu/bf16",
        NASTY,
        NASTY,
        "s",
        Direction.WORSE,
        Evidence.PAIRED,
        1.0,
        2.0,
        None,
        why=NASTY,
        labels=(NASTY,),
        failed=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_no_renderer_passes_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    columns = (Column(NASTY, shared=True), Column(NASTY), Column(NASTY, number=True), Column(NASTY, below=True))
    table = Table("t", NASTY, columns, (tuple(Field(NASTY) for _ in columns),))
    items = TextList((Text(NASTY),))
    page = Page(
        NASTY,
        NASTY,
        (Part("p", NASTY, (Text(NASTY), items, NameValuePairs(((NASTY, NASTY),)), Code(NASTY), table), NASTY),),
        (NASTY,),
        ((NASTY, NASTY),),
    )
    for width in (40, 400):
        assert not obeyed(render(page, width))
    assert obeyed(render(page, color=True)) == {"\x1b"} and "\x1b[31mred" not in render(page, color=True)
    assert not obeyed(markdown.render(page), "\t")
    assert not obeyed(html.render(page), "\t", "\u00a0", "\ufffd")
    assert not obeyed(csv_text(*comparison_rows([comparison()])))
    write_sentence_to_stderr(f"{NASTY}\n  {NASTY}")
    assert not obeyed(capsys.readouterr().err)


def test_a_build_server_gets_none_of_it() -> None:
    """JUnit text appears in logs, which are read on terminals."""
    judged = judge_first_look([comparison()], ())
    for verdict in (GateVerdict(NASTY, judged, (NASTY,)), GateVerdict(NASTY, (), (), NASTY, 3)):
        text = render_junit(verdict)
        assert not obeyed(text)
        ET.fromstring(text)


def test_the_live_line_draws_letters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    line = LiveLine(None, {})
    monkeypatch.setattr(line, "_write", written.append)
    monkeypatch.setattr(LiveLine, "num_columns", 80)
    line.show(NASTY)
    assert not obeyed(written[0].removeprefix("\r\x1b[2K"))
