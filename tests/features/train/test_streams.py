"""Streams of `fp8bench.watch` as pages: alone, side by side, while a loop runs, and on boards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8bench
from fp8bench.cli.main import main
from fp8bench.errors import UsageError
from fp8bench.features.train.kind import KIND, start_training
from fp8bench.features.train.lines import line_to_json
from fp8bench.features.train.page import render_page
from fp8bench.features.train.streams import is_stream_file, load_recorded_loops
from fp8bench.features.train.values import LayerReading, StepFigure, StepRow, StreamLine, TrainingEvent
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.report.elements import Lines, Page, TextList
from tests.learning_curves import judged, lines, training

GAPS = {"fp8": [0.02, 0.03, 0.025, 0.02, 0.03]}
ALARM = TrainingEvent("fp8", 0, 57, "alarm", "scales fall", "head", "input", (("rule", "falls"),), "raise margin")


def write(path: Path, content: Sequence[StreamLine]) -> Path:
    """Writes lines like `fp8bench.watch`: every stream has seed 0."""
    texts = [json.dumps(line_to_json(replace(line, seed=0))) for line in content]
    path.write_text("\n".join(texts) + "\n")
    return path


def write_seeds(folder: Path, arm: str, *more: StreamLine, seconds: float = 0.01) -> list[Path]:
    every = lines(GAPS, seconds={"fp8": seconds})
    return [
        write(
            folder / f"{arm}-{seed}.jsonl", [line for line in (*every, *more) if (line.arm, line.seed) == (arm, seed)]
        )
        for seed in range(5)
    ]


def chart(page: Page, name: str) -> Lines:
    (found,) = (element for part in page.parts for element in part.elements if getattr(element, "name", "") == name)
    assert isinstance(found, Lines)
    return found


def test_streams_have_the_verdict_of_the_same_training_but_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop twice as fast learns like the training, and is not called sooner."""
    bf16, fp8 = write_seeds(tmp_path, "bf16"), write_seeds(tmp_path, "fp8", seconds=0.005)
    (trained,) = judged(lines(GAPS)).verdicts.arms
    loops = JudgedTraining(load_recorded_loops([bf16, fp8]))
    (watched,) = loops.verdicts.arms
    assert watched.judged == trained.judged and watched.speed is None
    assert [row.tokens_per_second for row in loops.summaries] == pytest.approx([19200, 38400])
    sides = [",".join(map(str, paths)) for paths in (bf16, fp8)]
    assert main(["compare", *sides, "--store", str(tmp_path / "store")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "fp8: learns worse; worse by +2.5%" in printed and "streams do not show it" in printed
    assert main(["report", *sides, "--store", str(tmp_path / "store")]) == 0
    text = Path(capsys.readouterr().out.strip()).read_text()
    assert "Gap to the reference over steps" in text and "Streams of fp8bench.watch" in text
    with pytest.raises(UsageError, match="1 and 5 seeds"):
        load_recorded_loops([bf16, fp8[:1]])


def test_joined_seeds_have_the_name_that_they_share(tmp_path: Path) -> None:
    def write_loop(name: str) -> list[Path]:
        losses = [line for line in lines(GAPS) if isinstance(line, StepRow) and (line.arm, line.seed) == ("bf16", 0)]
        names = [f"{name}-{seed}" for seed in range(2)]
        return [write(tmp_path / f"{name}.jsonl", [replace(row, arm=name) for row in losses]) for name in names]

    loops = load_recorded_loops([write_loop("bf16"), write_loop("fp8")])
    assert [arm.name for arm in loops.training.arms] == ["bf16", "fp8"]


def test_a_stream_alone_has_curves_alarms_tensors_and_its_own_memory(tmp_path: Path) -> None:
    """Whatever its file is called: trainings also have files called steps.jsonl."""
    readings = [LayerReading("fp8", 0, step, "head", "input", 2.0**step, 0.0, 0.0, 1.0, 0.0) for step in (0, 10, 20)]
    memory = [
        StepFigure(arm, 0, step, "memory", size + step)
        for arm, size in (("fp8", 9), ("bf16", 5))
        for step in range(0, 100, 10)
    ]
    first = write_seeds(tmp_path, "fp8", ALARM, *readings, *memory)[0]
    stream = first.rename(tmp_path / "steps.jsonl")
    page = render_page(JudgedTraining(load_recorded_loops([[stream]])))
    titles = [part.title for part in page.parts]
    assert titles[0] == "How it learned" and "What happened" in titles
    flags = [mark.flag for mark in chart(page, "loss").series[0][1] if mark and mark.flag]
    assert flags == ["falls"]
    (_, octaves), *others = chart(page, "tensors-1-inputs").series
    assert [mark and mark.value for mark in octaves] == [-10, 0, 10] and not others
    both = render_page(JudgedTraining(load_recorded_loops([write_seeds(tmp_path, "bf16", *memory)[:1], [stream]])))
    assert [name for name, _ in chart(both, "memory-over-steps").series] == ["bf16", "fp8"]
    store = tmp_path / "store"
    assert (
        main(["report", str(stream), "--store", str(store)]) == main(["show", str(stream), "--store", str(store)]) == 0
    )
    writer = start_training(training(), store)
    writer.close()
    kept = writer.path
    assert (
        is_stream_file(stream)
        and not is_stream_file(kept)
        and not is_stream_file(tmp_path)
        and not is_stream_file(tmp_path / "none")
    )
    assert KIND.find(str(kept), store) == kept


def test_a_loop_that_failed_says_so_first_and_shows_its_first_steps(tmp_path: Path) -> None:
    """A script is watched from its second step on. One sentence names the losses of its casts."""
    losses = [line for line in lines(GAPS) if isinstance(line, StepRow) and (line.arm, line.seed) == ("bf16", 0)]
    rising = [replace(row, loss=4.0 + row.step, gradient_norm=1e9 if row.step in (5, 6) else 1.0) for row in losses[1:]]
    alarm = TrainingEvent("bf16", 0, 12, "alarm", "the loss rose", values=(("rule", "loss-back-up"),))
    cast = LayerReading("bf16", 0, 1, "head", "input", 1.0, 0.0, 0.0, 1.0, 0.0, underflow=0.25, signal_to_noise=30.0)
    page = render_page(JudgedTraining(load_recorded_loops([[write(tmp_path / "a.jsonl", [*rising, alarm, cast])]])))
    (sentences,) = (element for element in page.parts[0].elements if isinstance(element, TextList))
    assert [sentence.text for sentence in sentences.items] == [
        "bf16: the loss rose from 5 in step 1 to 103 in step 99; 1 alarm, the first in step 12: the loss rose",
        "casts: at most 25.0% of a tensor underflows, and at most 0.0% saturates",
    ]
    assert chart(page, "gradient-norm-over-steps").description.endswith("The axis fits the last two thirds.")
    drawn = chart(page, "loss").series[0][1]
    assert drawn[1] is not None and drawn[1].value == 5.0
    plain = render_page(JudgedTraining(load_recorded_loops([[write(tmp_path / "b.jsonl", losses)]])))
    (sentences,) = (element for element in plain.parts[0].elements if isinstance(element, TextList))
    assert sentences.items[0].text.endswith("; 0 alarms") and sentences.items[1].text.startswith("no cast was measured")


def test_a_loop_without_tokens_has_steps_a_second(tmp_path: Path) -> None:
    content = [replace(line, tokens=0) if isinstance(line, StepRow) else line for line in lines(GAPS)]
    path = write(tmp_path / "a.jsonl", [line for line in content if (line.arm, line.seed) == ("fp8", 1)])
    rows = [
        replace(line, seconds=0.01 + line.step / 1e4) if isinstance(line, StepRow) else line for line in content[:9]
    ]
    slower = write(tmp_path / "b.jsonl", rows)
    loops = JudgedTraining(load_recorded_loops([[path], [slower]]))
    assert [row.tokens_per_second for row in loops.summaries] == [None, None]
    assert chart(render_page(loops), "steps-per-second-over-steps").series[0][1][0] is not None


def test_a_loop_has_a_live_page_and_tells_each_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page reloads until the loop ends. An exception from `on_alarm` ends the loop."""
    model, live = nn.Linear(4, 4), tmp_path / "live.html"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[TrainingEvent] = []

    def stop(event: TrainingEvent) -> None:
        told.append(event)
        raise KeyboardInterrupt

    def train() -> None:
        with fp8bench.watch(model, optimizer, tmp_path / "a.jsonl", live=live, on_alarm=stop):
            for step in range(100):
                if step == 30:
                    assert 'http-equiv="refresh"' in live.read_text() and "in step 0" in live.read_text()
                    optimizer.param_groups[0]["lr"] = 1e3
                optimizer.zero_grad()
                (model(torch.randn(8, 4)) - 1).square().mean().backward()
                optimizer.step()

    with pytest.raises(KeyboardInterrupt):
        train()
    assert len(told) == 1 and told[0].describe(is_watched=True) in " ".join(capsys.readouterr().err.split())
    assert "refresh" not in live.read_text() and told[0].rule in live.read_text()
    with pytest.raises(UsageError, match="Give a path"), fp8bench.watch(model, optimizer, live=live):
        pass
