"""Scripts run by `fp8bench watch`: they behave as under Python alone, and their streams are complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.main import main
from fp8bench.features.watch.script import Script
from tests.counts import for_each
from tests.features.watch import scripts

Done = subprocess.CompletedProcess[str]


def run(folder: Path, text: str, *words: str, watch: str | None = None, launcher: tuple[str, ...] = ()) -> Done:
    """Runs the text as script.py under fp8bench's `watch` with these options."""
    (folder / "script.py").write_text(text)
    watching = [] if watch is None else ["-m", "fp8bench", "watch", *watch.split()]
    command = [sys.executable, *launcher, *watching, "script.py", *words]
    environment = {**os.environ, "COLUMNS": ""}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def lines_of(stream: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stream.read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]


def losses_of(stream: Path) -> list[float]:
    return [row["loss"] for row in lines_of(stream, "step")]


@pytest.mark.slow
@for_each("end", ["exit", "raise"])
def test_a_script_keeps_its_output_exit_code_and_traceback(tmp_path: Path, end: str) -> None:
    alone = run(tmp_path, scripts.PLAIN, "--end", end)
    watched = run(tmp_path, scripts.PLAIN, "--end", end, watch="--stride 4 --stream s.jsonl")
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout)
    own = [line for line in watched.stderr.splitlines(keepends=True) if "fp8bench:" not in line]
    assert "".join(own) == alone.stderr
    losses = [float(line.split()[1]) for line in alone.stdout.splitlines()[:12]]
    rows = lines_of(tmp_path / "s.jsonl", "step")
    assert [row["step"] for row in rows] == [*range(1, 12)], "watching begins one step later"
    assert losses_of(tmp_path / "s.jsonl") == pytest.approx(losses[1:])
    assert {1, 4, 8} & {reading["step"] for reading in lines_of(tmp_path / "s.jsonl", "reading")}
    assert "watching Sequential by SGD from its second step on: s.jsonl" in watched.stderr


@pytest.mark.slow
def test_spawned_workers_import_the_script_and_are_not_watched(tmp_path: Path) -> None:
    alone = run(tmp_path, scripts.PLAIN, "--workers", "1")
    watched = run(tmp_path, scripts.PLAIN, "--workers", "1", watch="")
    assert alone.returncode == watched.returncode == 0 and watched.stdout == alone.stdout
    (stream,) = (tmp_path / ".fp8bench" / "watched").iterdir()
    assert stream.name == "script-1.jsonl" and len(losses_of(stream)) == 11


@pytest.mark.slow
@for_each("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_script_as_ever_and_leaves_a_readable_stream(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(scripts.PLAIN)
    command = [sys.executable, "-m", "fp8bench", "watch", "--stride", "3", "--stream", "s.jsonl", "script.py"]
    with subprocess.Popen(
        [*command, "--end", "waits"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("9 "):
                break
        process.send_signal(number)
        errors = process.stderr.read()
        assert process.wait(60) == -number
    rows = losses_of(tmp_path / "s.jsonl")
    assert len(rows) == 9 if number != signal.SIGKILL else 6 <= len(rows) <= 9
    assert ("KeyboardInterrupt" in errors) == ("10 steps of" in errors) == (number == signal.SIGINT)


@pytest.mark.slow
def test_each_optimizer_of_a_gan_has_its_stream(tmp_path: Path) -> None:
    """The generator's loss passes through the critic, but is not the critic's."""
    watched = run(tmp_path, scripts.GAN, watch="--stream s.jsonl --live page.html")
    critic, generator = zip(*[map(float, line.split()) for line in watched.stdout.splitlines()], strict=True)
    assert losses_of(tmp_path / "s.jsonl") == pytest.approx(critic[1:])
    assert losses_of(tmp_path / "s.2.jsonl") == pytest.approx(generator[1:])
    assert not lines_of(tmp_path / "s.jsonl", "event")
    pages = [(tmp_path / name).read_text() for name in ("page.html", "page.2.html")]
    # At the end, the pages no longer reload themselves.
    assert all("How it learned" in page and 'http-equiv="refresh"' not in page for page in pages)


@pytest.mark.slow
def test_ranks_are_joined_on_the_first(tmp_path: Path) -> None:
    """Losses and norms of two ranks, replicated or sharded, are those of one process with the whole batch."""
    run(tmp_path, scripts.RANKS, "one", watch="--stride 3 --stream one.jsonl")
    names = ("step", "loss", "gradient_norm", "parameter_norm")
    expected = [[row[name] for name in names] for row in lines_of(tmp_path / "one.jsonl", "step")]
    keys = {(reading["layer"], reading["role"]) for reading in lines_of(tmp_path / "one.jsonl", "reading")}
    for how in ("ddp", "fsdp"):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        done = run(tmp_path, scripts.RANKS, how, watch=f"--stride 3 --stream {how}.jsonl", launcher=launcher)
        assert done.returncode == 0, done.stderr[-2000:]
        rows = [[row[name] for name in names] for row in lines_of(tmp_path / f"{how}.jsonl", "step")]
        assert rows == [pytest.approx(row, rel=1e-4) for row in expected], how
        readings = lines_of(tmp_path / f"{how}.jsonl", "reading")
        assert {(reading["layer"], reading["role"]) for reading in readings} == keys, how
        assert done.stderr.count("watching ") == 1 and not lines_of(tmp_path / f"{how}.jsonl", "event")


@pytest.mark.slow
def test_accelerate_and_transformers_with_accumulation(tmp_path: Path) -> None:
    """The rows have the losses that the real packages log, also if parts have unequal numbers of tokens."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    watched = run(tmp_path, scripts.ACCELERATE, watch="--stream a.jsonl")
    assert losses_of(tmp_path / "a.jsonl") == pytest.approx(list(map(float, watched.stdout.splitlines()))[1:])
    watched = run(tmp_path, scripts.TRAINER, str(tmp_path / "out"), watch="--stream t.jsonl")
    logged = [line.split()[1:] for line in watched.stdout.splitlines() if line.startswith("logged")]
    assert losses_of(tmp_path / "t.jsonl") == pytest.approx([float(loss) for loss, _ in logged[1:]], abs=1e-3)
    norms = [row["gradient_norm"] for row in lines_of(tmp_path / "t.jsonl", "step")]
    assert norms == pytest.approx([float(norm) for _, norm in logged[1:]], rel=1e-3)


# Settings that the script makes before importing torch must have an effect.
NO_TORCH = """
import sys
print(1 + len({"torch", "numpy"} & set(sys.modules)))
"""
NO_MODULE = """
import torch
w = torch.ones(3, requires_grad=True)
o = torch.optim.SGD([w], lr=1)
w.sum().backward(); o.step(); print(1)
"""
DEEPSPEED = """
import sys, types
import torch
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
class Engine(torch.nn.Linear):
    __module__ = "deepspeed.engine"
m = Engine(2, 2)
o = torch.optim.SGD(m.parameters(), lr=1)
m(torch.ones(2)).sum().backward(); o.step(); print(1)
"""
FAULT = """
import torch
from fp8bench.features.train.lab import own_loop
own_loop.UserLoopRecorder._end_step = lambda *_: 1 / 0
m = torch.nn.Linear(2, 2)
o = torch.optim.SGD(m.parameters(), lr=1)
for _ in range(4):
    m(torch.ones(2)).sum().backward(); o.step()
print(1)
"""


@pytest.mark.slow
@for_each(
    ("text", "words"),
    [
        (NO_TORCH, "this process did not import torch"),
        ("import torch; print(1)", "no optimizer of torch.optim has taken a step"),
        (NO_MODULE, "SGD is not watched: no module of torch holds the 1 tensor that it changes. Add a line"),
        (DEEPSPEED, "DeepSpeed keeps parameters in partitions"),
        (FAULT, "watching ends here, and the training goes on: ZeroDivisionError"),
    ],
)
def test_what_is_not_watched_is_said_once_and_the_script_goes_on(tmp_path: Path, text: str, words: str) -> None:
    watched = run(tmp_path, text, watch="")
    assert (watched.returncode, watched.stdout) == (0, "1\n") and watched.stderr.count(words) == 1


@pytest.mark.slow
def test_a_dropped_model_is_freed(tmp_path: Path) -> None:
    """Watching holds no model of an earlier fold, whose memory the next one needs."""
    text = """
import gc, weakref
import torch
gc.disable()
def fold():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad(); model(torch.ones(2, 4)).square().mean().backward(); optimizer.step()
    return weakref.ref(model)
fold()
print([fold()() is None for _ in range(2)])
"""
    watched = run(tmp_path, text, watch="--stream s.jsonl")
    assert watched.stdout == "[True, True]\n"
    assert [len(losses_of(tmp_path / name)) for name in ("s.jsonl", "s.2.jsonl", "s.3.jsonl")] == [4, 4, 4]


@for_each(
    ("words", "message"),
    [
        (["none.py"], "the file none.py does not exist"),
        (["a.ipynb"], "is a notebook"),
        (["--precision", "fp9", "script.py"], "fp8"),
        (["--stream", "script.py", "script.py"], "streams are never overwritten"),
        (["--stride", "0", "script.py"], "stride"),
        (["--lr", "1", "script.py"], "go after it: fp8bench watch train.py --lr VALUE."),
    ],
)
def test_wrong_usage_ends_before_the_script(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit(9)")
    assert main(["watch", *words]) == 2 and message in capsys.readouterr().err


@for_each(("rank", "writes"), [("", True), ("abc", True), ("0", True), ("1", False)])
def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, writes: bool) -> None:
    """RANK may be anything in a script that no launcher has started."""
    scripts_run = list[Script]()

    def note(script: Script, say: object) -> int:
        scripts_run.append(script)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("fp8bench.features.watch.command.run_script", note)
    (tmp_path / "script.py").write_text("")
    options = ["--on-alarm", "true", "--log", "tensorboard:logs", "--live", "page.html"]
    assert main(["watch", *options, "script.py"]) == 0
    (script,) = scripts_run
    assert script.is_writer is writes and script.options["on_alarm"] == "true"
    assert script.options["log"] == ("tensorboard:logs",) and script.options["live"] == tmp_path / "page.html"
