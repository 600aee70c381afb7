"""A study as a person reads it, and as programs do."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import pytest

from fp8bench.features.sensitivity.command import page_of, rows_of
from fp8bench.features.sensitivity.study import By, LayerTrial, Study, value_of
from fp8bench.report.data.plain import csv_text
from fp8bench.report.terminal.layout import render
from tests.counts import for_each

BASE = LayerTrial("reference", "", "bf16", losses=(3.0, 2.0))
LAYERS = ("blocks.0.attn.qkv", "blocks.0.mlp.up", "blocks.1.attn.qkv", "blocks.1.mlp.up", "head")
MAP = (("head", "fp8"), ("blocks.0.mlp.up", "bf16"))


def low(name: str, loss: float, error: float) -> LayerTrial:
    kind = name.split(".")[-2] if "." in name else name
    return LayerTrial(name, kind, "bf16", ((name, "fp8"),), (name,), 0, (3.0, loss), error)


PROBES = (
    low(LAYERS[0], 2.001, 0.04), low(LAYERS[1], 2.2, 0.03), low(LAYERS[2], 1.99, 0.02), low(LAYERS[3], 1.9, 0.01),
    replace(low(LAYERS[4], 2.0, 0.3), losses=(), failure="the loss is nan in step 2"),
)  # fmt: skip
CANDIDATES = (
    LayerTrial("all layers", "", "fp8", MAP[:1], LAYERS, 0, (3.0, 2.3), 0.06),
    LayerTrial("all layers but blocks.0.mlp.up", "", "fp8", MAP, LAYERS[1:], 0, (3.0, 2.01)),
)
STUDY = Study(
    "transformer", (("size", "nano"), ("batch", 2)), "cpu", "fp8", "bf16", "emulated", By.LAYER, 2, 0.01, 0, BASE,
    (replace(BASE, draw=1, losses=(3.0, 2.03)), replace(BASE, draw=2, losses=(3.0, 1.99))), PROBES, CANDIDATES, True,
    path="store/sensitivity/x.json",
)  # fmt: skip
COMMAND = """\
  fp8bench suite transformer --set size=nano --dtypes fp8 --reference bf16 --precision-map \\
    head=fp8,blocks.0.mlp.up=bf16"""
TEXT = f"""\
sensitivity of transformer size=nano batch=2 on cpu

fp8 (emulated) in one layer at a time, bf16 in the rest
reference: loss 2.0000, the mean of the last 1 of 2 steps; other draws of its weights: +1.50% and
  -0.50%, so that a gap up to 1.50% is noise

  low layer          kind  loss gap  gradient error  verdict
  head               head         -           30.0%  failed
      the loss is nan in step 2
  blocks.0.mlp.up    mlp    +10.00%            3.0%  worse
  blocks.0.attn.qkv  attn    +0.05%            4.0%  within the noise
  blocks.1.attn.qkv  attn    -0.50%            2.0%  within the noise
  blocks.1.mlp.up    mlp     -5.00%            1.0%  better

gradient errors together, by kind: attn 4.5%, mlp 3.2%, head 30.0%
gradient errors together, by place: blocks.0 5.0%, blocks.1 2.2%, head 30.0%

  candidate                       layers low  loss gap  verdict
  all layers                               5   +15.00%  loses too much
  all layers but blocks.0.mlp.up           4    +0.50%  keeps the loss

suggested: fp8 in all layers but blocks.0.mlp.up (4 of 5). That map was trained: its loss gap is
  +0.50%, within the tolerance of 1.0%
mind: the tolerance is below the noise of 1.50%, so that a gap may be within it by chance
{COMMAND}
"""


def test_a_study_as_text() -> None:
    """Layers in order, attention against feed-forward, the map and its gap, and how to read it."""
    text = render(page_of(STUDY))
    assert text.startswith(TEXT), text
    assert "\nhow to read this\n" in text and "\n\nstored in store/sensitivity/x.json\n" in text
    assert widest(text) <= 100


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@for_each("width", [40, 60, 80])
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    assert widest(render(page_of(STUDY), width=width)) <= width
    assert "\x1b[" in render(page_of(STUDY), color=True)


def test_by_kind_there_is_nothing_to_put_together() -> None:
    text = render(page_of(replace(STUDY, by=By.KIND, probes=(low("attn", 2.0, 0.1), low("mlp", 2.2, 0.2)))))
    assert "one layer kind at a time" in text and "together, by" not in text and "  low   loss gap" in text


def test_a_study_without_a_map_says_so() -> None:
    lost = replace(STUDY, candidates=CANDIDATES[:1])
    assert "no map with fp8 in some layer keeps the loss within 1.0%: every map was tried" in render(page_of(lost))
    assert "it was interrupted before all maps were" in render(page_of(replace(lost, finished=False)))


def test_a_study_cut_short_tells_what_there_is() -> None:
    early = replace(STUDY, draws=(), probes=PROBES[:1], candidates=())
    assert "so that a gap" not in render(page_of(early)) and "suggested" not in render(page_of(early))
    failed = Study(**{**vars(STUDY), "baseline": replace(BASE, losses=(), failure="crash"), "draws": (), "probes": (),
                      "candidates": ()})  # fmt: skip
    assert "the reference itself failed: crash" in render(page_of(failed))


def test_json_has_everything_and_what_it_says() -> None:
    diverged = replace(PROBES[4], losses=(3.0, math.nan))
    document = value_of(replace(STUDY, probes=(*PROBES[:4], diverged)))
    assert document["noise"] == pytest.approx(0.015) and document["suggested"] == "head=fp8,blocks.0.mlp.up=bf16"
    assert document["ranking"][:2] == ["head", "blocks.0.mlp.up"]
    assert document["probes"][1]["loss_gap"] == pytest.approx(0.1) and document["probes"][1]["says"] == "worse"
    assert document["probes"][4]["losses"] == [3.0, "nan"] and document["probes"][4]["loss"] is None
    assert document["baseline"]["losses"] == [3.0, 2.0]


def test_csv_has_a_row_a_run() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(*rows_of(STUDY)))))
    assert [row["part"] for row in rows] == ["reference", "draw", "draw", *["low"] * 5, "candidate", "candidate"]
    assert (rows[3]["name"], rows[3]["says"], rows[3]["loss"], rows[3]["keeps_loss"]) == ("head", "failed", "", "")
    assert float(rows[4]["loss_gap"]) == pytest.approx(0.1) and rows[4]["failure"] == ""
    assert [row["keeps_loss"] for row in rows[-2:]] == ["False", "True"]
    assert rows[-1]["precision_map"] == "head=fp8,blocks.0.mlp.up=bf16" and rows[-1]["layers_low"] == "4"
