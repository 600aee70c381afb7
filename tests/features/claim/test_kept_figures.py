"""The figures of an H200 in the docs follow from what was kept of it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from fp8bench.features.claim.command import parse_claim_run_requests
from fp8bench.features.claim.folder import check_folder, read_answers
from fp8bench.features.claim.rows import load_claims_file
from fp8bench.features.claim.values import AnswerCheckOutcome, ClaimOutcome
from fp8bench.store.runs.run_file import load_run
from suites.trials import ROOT
from tests.commands import Say
from tests.counts import for_each
from tests.features.claim.answer_kept import CPU, H200, PAGE, table_of

SHAPES = ("4096x4096", "16384x4096", "4096x16384")
PRODUCT_FLOPS = 2 * 8192**3


def read_page(name: str) -> str:
    """The text of a page, wherever its lines break."""
    return " ".join((ROOT / name).read_text().split())


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    """The recomputed figures by id of claim; every row is checked on the way."""
    checked = check_folder(H200, parse_claim_run_requests)
    assert [
        (answer.id, answer.why) for answer in checked if answer.standing is not AnswerCheckOutcome.ANSWER_HOLDS
    ] == []
    values = {}
    for answer in read_answers(H200).answers:
        assert answer.answer is ClaimOutcome.WITHIN_RANGE and answer.value is not None, answer.row.id
        (bound,) = answer.row.bound
        digits = len(Decimal(repr(bound)).normalize().as_tuple().digits)
        assert float(f"{answer.value:.{digits}g}") == bound, f"{answer.row.id} is quoted rounded"
        values[answer.row.id] = answer.value
    return values


def test_the_table_of_an_h200_has_the_recomputed_figures(figures: dict[str, float]) -> None:
    page = read_page("docs/gpu.md")
    for mode, scale in (("fp8", "fp8, a scale a tensor"), ("fp8-rowwise", "fp8-rowwise, a scale a row")):
        cells = []
        for name in ("sustained", "energy", "slots"):
            total = f"{figures[f'{mode}-{name}']:.2f}"
            by_shape = ", ".join(f"{figures[f'{mode}-{name}-{shape}']:.2f}" for shape in SHAPES)
            by_shape += " by shape" if (mode, name) == ("fp8", "sustained") else ""
            cells.append(f"{total} ({by_shape})" if name == "slots" else f"**{total}** ({by_shape})")
        assert f"| {scale} | {' | '.join(cells)} |" in page
    rates = {mode: f"{PRODUCT_FLOPS / figures[f'{mode}-8192-sustained'] / 1e12:,.0f}" for mode in ("bf16", "fp8")}
    slots = {mode: f"{figures[f'{mode}-8192-slots'] / 1e12:,.0f} TFLOP/s" for mode in ("bf16", "fp8")}
    joules = {mode: f"{figures[f'{mode}-8192-energy']:.2f} J" for mode in ("bf16", "fp8")}
    fastest = f"up to {figures['bf16-fastest-slots'] / 1e12:.0f}"
    assert f"bf16 | {rates['bf16']} TFLOP/s | {joules['bf16']} | {slots['bf16']} next to fp8, {fastest} |" in page
    speed = figures["fp8-8192-sustained-speedup"]
    energy = figures["fp8-8192-energy-ratio"]
    assert f"fp8 | {rates['fp8']} TFLOP/s ({speed:.2f}) | {joules['fp8']} ({energy:.2f}) | {slots['fp8']} |" in page


def test_a_sum_is_that_of_the_figures_in_the_csv(figures: dict[str, float], fp8bench: Say) -> None:
    """By hand: the time of the reference in all products, over the times that the speed-ups make of it."""
    code, out, _ = fp8bench("show", str(H200 / "runs" / "7816318e.jsonl"), "--csv", "-")
    rows = [row for row in csv.DictReader(io.StringIO(out)) if row["phase"] == "step"]
    assert code == 0
    base = 0.0
    times = 0.0
    joules = Counter[str]()
    for row in rows:
        if row["metric"] == "energy":
            joules[row["mode"]] += float(row["median_in_unit"])
        if row["metric"] == "time" and row["mode"] == "fp8":
            keys = ("param_n", "param_k", "metric")
            (best,) = (
                float(r["best_in_unit"]) for r in rows if r["mode"] == "bf16" and not any(r[k] != row[k] for k in keys)
            )
            base += best
            times += best / float(row["speedup"])
    assert figures["fp8-slots"] == pytest.approx(base / times, rel=1e-12)
    assert figures["fp8-energy"] == pytest.approx(joules["fp8"] / joules["bf16"], rel=1e-12)


def test_the_power_cap_of_every_run_is_the_quoted_one() -> None:
    for path in (H200 / "runs").glob("*.jsonl"):
        run = load_run(path)
        assert (
            run.environment.get("cuda:0 power_cap") == 700
            and not run.troubles
            and run.devices[-1].name == "NVIDIA H200"
        )


# Figures that are no claim, because what was kept of them is no run.


@for_each(
    ("page", "text"),
    [("docs/energy.md", "within 0.76% of NVML's total (688 W"), ("docs/gpu.md", "0.76% of 688 W")],
)
def test_energy_windows_next_to_nvml(page: str, text: str) -> None:
    probe = json.loads((H200 / "probe.json").read_text())["energy"]
    off = probe["window_watts"] / probe["nvml_watts"] - 1
    assert (f"{off:.2%}", f"{probe['nvml_watts']:.0f}") == ("0.76%", "688") and text in read_page(page)


def test_the_other_kept_figures_are_those_of_the_page() -> None:
    page = read_page("docs/gpu.md")
    # 1. Casts and products by class; three casts of fp8-block beyond its range compared the emulation with itself.
    classes: Counter[str] = Counter()
    modes = json.loads((H200 / "conform.json").read_text())["modes"]
    native = [mode for mode in modes if mode["support"]["level"] == "native"]
    for mode in native:
        classes.update(found["difference"] for found in mode["found"])
    assert classes == {"none": 66, "order": 43, "units": 38}
    assert (
        f"0 of {len(native)} native precisions: {66 - 3} the same bits, 43 the order of sums, 38 the sums of the units"
        in page
    )
    # 2. Marks, and the harness's checks.
    marker = json.loads((H200 / "probe.json").read_text())["overheads"]["marker_on"]
    assert f"| {marker * 1e6:.1f} us a marker" in page
    selftest = (H200 / "selftest.txt").read_text()
    assert "same, 0.9998 [0.9990, 1.0011]" in selftest and "an identical product 0.9998 [0.9990, 1.0011]" in page
    assert "slower, 1.1337 [1.1330, 1.1350]" in selftest and "injected work 1.134 [1.133, 1.135]" in page
    assert selftest.count("\nok ") + selftest.startswith("ok ") == 8 and "| 0 of 8; an identical" in page
    # 3. The tests that need a GPU.
    tests = re.findall(r"tests/gpu/\S+ failures \|.*?\| (\d+) failed, (\d+) held", (H200 / "table.md").read_text())
    failed, held = (sum(int(counts[index]) for counts in tests) for index in (0, 1))
    assert f"| {held} pass, {failed} fail; three files were cut off or not begun |" in page


def test_folders_without_data_are_listed_as_not_recomputable() -> None:
    listed = (ROOT / "reports" / "README.md").read_text().partition("keep a README alone")[2].partition("Nor can")[0]
    alone = {
        folder.name
        for folder in (ROOT / "reports").iterdir()
        if [path.name for path in files_in(folder)] == ["README.md"]
    }
    assert alone == {*re.findall(r"\w+_\d{6}", listed)}


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_first_row_of_the_page_is_one_to_copy(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "mine.toml").write_text(example)
    parse_claim_run_requests(load_claims_file(tmp_path / "mine.toml"))


def test_the_page_has_the_committed_answers_in_at_most_900_words() -> None:
    page = PAGE.read_text()
    assert page.endswith(table_of(read_answers(CPU).answers)) and len(page.split()) <= 900
