"""No name of the code is seen on a page: figures, phases and kinds of data have words."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.report.page.html import render
from fp8bench.report.page.section import make_report_material, report_page
from fp8bench.store.runs.run_file import load_run

ROOT = Path(__file__).resolve().parents[3]
RUNS = [
    "reports/sample/run.jsonl",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/golden/stores").glob("*/runs/*box/*.jsonl")),
]
# Typed names (a case's), and foreign names: of a file, a system, a kernel, an operator, a module of a model.
TYPED = re.compile(r"\w+\[[^\]]*\]@\S+")
OF_OTHERS = re.compile(r"[\w./-]*/[\w./-]+|\w+::\w+|\w+\.\w+(?:\.\w+)*|Linux-\S+|nvjet_\w+|\S*…\S*")


def visible_text(page: str) -> str:
    body = page.partition("<body>")[2]
    body = re.sub(r"<(script|style|code|pre|desc|title)\b.*?</\1>", " ", body, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", " ", body))


def find_raw_names(text: str) -> set[str]:
    return set(re.findall(r"\w*[a-z0-9]_[a-z0-9]\w*", OF_OTHERS.sub(" ", TYPED.sub(" ", text))))


def test_raw_names_are_found() -> None:
    page = "<body><td>gradient_error</td> micro_batches=2 blocks.0.norm_attn <code>loss_error</code><p title='a_b'>x"
    assert find_raw_names(visible_text(page)) == {"gradient_error", "micro_batches"}


@pytest.mark.parametrize(
    "path", [*RUNS[::5], *(pytest.param(path, marks=pytest.mark.slow) for path in RUNS if path not in RUNS[::5])]
)
def test_a_page_shows_no_raw_name(path: str) -> None:
    """The figures and phases of these runs, such as gradient_error, product_error and data_load."""
    run = load_run(ROOT / path)
    assert not find_raw_names(visible_text(render(report_page(make_report_material([run], [findings(run)])))))
