"""A lab that trains nothing: losses are a function of seed, arm and step, so that lines are known exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8bench.errors import WorkerError, WorkerFault, WorkerLost
from fp8bench.features.train.arms import make_arms
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.values import (
    WATCHED_SECONDS,
    ArmCost,
    ArmState,
    SeedTask,
    StepFigure,
    StepRow,
    StoredTraining,
    StreamLine,
    TokenSpan,
    Training,
    TrainingEvent,
    TrainingObserver,
    TrainingTokens,
    Validation,
)
from fp8bench.measure.handle import Worker
from fp8bench.model import DeviceFacts, Environment, MemoryUse, Scalar
from tests.facts import CPU

LOST = WorkerLost("the worker crashed during 'advance'")


@dataclass
class FakeLab(Worker):
    """Answers as a lab does. `fault` returns what strikes a request, by its name, arm, seed and next step."""

    fault: Callable[[str, str, int, int], BaseException | None] = lambda name, arm, seed, step: None
    steps: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, ...]] = field(default_factory=list)
    restarts: int = 0
    closed: bool = False
    facts: DeviceFacts = CPU
    task: SeedTask | None = None
    # Changes a row.
    change: Callable[[StepRow], StepRow] = lambda row: row

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        arm = str(arguments[0]) if name in ("advance", "validate", "drop") else ""
        self.log.append((name, *map(str, arguments[:2])) if name != "begin" else (name, str(arguments[0].seed)))
        if self.task is not None or name == "begin":
            seed = arguments[0].seed if name == "begin" else self.task.seed if self.task else 0
            error = self.fault(name, arm, seed, self.steps.get(arm, 0))
            if error is not None:
                raise error
        return getattr(self, f"_{name}")(*arguments)

    def close(self) -> None:
        self.closed = True

    def restart(self) -> None:
        self.restarts += 1
        self.steps, self.task = {}, None

    def _probe(self) -> tuple[DeviceFacts, ...]:
        return (self.facts,)

    def _software(self) -> dict[str, Scalar | None]:
        return {"torch": self.facts.torch}

    def _begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        self.task, self.steps = task, {arm.name: 0 for arm in task.arms}
        return tuple(ArmState(arm.name, 1000, 32, (("weights", 4.0), ("moments", 8.0))) for arm in task.arms)

    def _measure_memory(self, task: SeedTask) -> ArmCost:
        (arm,) = task.arms
        kept = (("weights", 4000), ("moments", 8000))
        return ArmCost(arm.name, task.seed, kept=kept, memory=MemoryUse(20_000, (("weights", 4000),)))

    def _advance(self, arm: str, steps: int) -> tuple[StreamLine, ...]:
        assert self.task is not None and steps > 0
        first = self.steps[arm]
        self.steps[arm] += steps
        return tuple(self.change(row_of(arm, self.task.seed, step)) for step in range(first, first + steps))

    def _validate(self, arm: str, last: bool = False) -> tuple[Validation, ...]:
        assert self.task is not None
        step = self.steps[arm]
        loss = row_of(arm, self.task.seed, step).loss + 0.125
        looks = ("held-out", "quantised:fp8") if last else ("held-out",)
        return tuple(Validation(arm, self.task.seed, step, of, loss, 64) for of in looks)

    def _drop(self, arm: str) -> None:
        del self.steps[arm]

    def _save(self, folder: str) -> tuple[str, ...]:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "state.json").write_text(json.dumps(self.steps))
        return ()

    def _restore(self, folder: str) -> tuple[tuple[str, int], ...]:
        try:
            kept = json.loads((Path(folder) / "state.json").read_text())
        except (OSError, ValueError):
            raise WorkerFault("StoreError", f"{folder} holds no complete checkpoint.") from None
        self.steps = {name: kept.get(name, step) for name, step in self.steps.items()}
        return tuple(self.steps.items())


def row_of(arm: str, seed: int, step: int) -> StepRow:
    """A falling loss with different digits for every arm, seed and step."""
    name = arm.removesuffix(" again")
    loss = 4.0 / (1 + step / 8) + (sum(map(ord, name)) % 7 + 1) / 1000 + seed / 64
    return StepRow(arm, seed, step, loss, 1e-3, 1.0, 0.0, 8.0, 1e-3, 1.0, 32, 0.5)


def strikes(
    arm: str,
    at: int,
    error: WorkerError | KeyboardInterrupt = LOST,
    times: int = 1,
    seed: int = 0,
    name: str = "advance",
) -> Callable[[str, str, int, int], BaseException | None]:
    """A fault that fails an arm's requests from a step on, `times` times."""
    left = [times]

    def fault(asked: str, of: str, in_seed: int, step: int) -> BaseException | None:
        if (asked, of, in_seed) != (name, arm, seed) or step < at or not left[0]:
            return None
        left[0] -= 1
        return error

    return fault


@dataclass
class NotedTraining(TrainingObserver):
    """An observer that keeps what it receives."""

    notes: list[str] = field(default_factory=list)
    doings: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    def working(self, arm: str, doing: str) -> None:
        self.doings.append(f"{doing} of {arm}")

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        self.places.append((number, step))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def said(kept: StoredTraining) -> list[StreamLine]:
    """The lines of a training without resumptions, restarts, times and memory."""
    return [
        replaced(line)
        for line in kept.lines
        if not isinstance(line, TrainingEvent) or line.kind not in ("resumed", "restarted", "out")
    ]


def replaced(line: StreamLine) -> StreamLine:
    if isinstance(line, ArmCost):
        return replace(line, memory=None, energy=None, why="")
    if isinstance(line, StepFigure) and line.name in ("memory", WATCHED_SECONDS):
        return replace(line, value=0.0)
    return replace(line, seconds=0.0) if isinstance(line, StepRow) else line


def small(**changes: Any) -> TrainingRequest:
    """Two seeds of a few steps, without energy."""
    usual = {"steps": 20, "seeds": 2, "evaluate": 10, "keep": 6, "data": "text.txt", "energy": False}
    return TrainingRequest(**{**usual, "bands": ("repeat",), **changes})


def training(number: int = 1) -> Training:
    """A training that has just started."""
    request, span = small(), TokenSpan("text.tokens", 0, 10_000)
    text = TrainingTokens(span, span, 256, "bytes", "text:0123abcd")
    return Training(
        f"{number:08x}",
        f"2026-01-05T12:00:{number:02d}.000+00:00",
        "fp8bench train",
        request,
        make_arms(request, CPU),
        CPU,
        Environment({"commit": "f" * 40, "machine": "box"}),
        text,
        1000,
    )


def write_text(folder: Path = Path()) -> Path:
    path = folder / "text.txt"
    path.write_text("every token is a byte of this text. " * 4000)
    return path


def write_tokens(folder: Path) -> None:
    """Token files with a short held-out part, as validation takes most of a short training's time."""
    folder.mkdir()
    text = b"every token is a byte of this text. " * 40
    for name, part in (("train.bin", text), ("val.bin", text[:81])):
        (folder / name).write_bytes(b"".join(byte.to_bytes(2, "little") for byte in part))
