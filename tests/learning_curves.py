"""Trainings made by hand for verdicts: losses as numbers, and the lines that would report them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.values import (
    Arm,
    ArmRole,
    StepRow,
    StoredTraining,
    StreamLine,
    TokenSpan,
    Training,
    TrainingTokens,
    Validation,
)
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model import Environment
from tests.facts import CPU

TEXT = TrainingTokens(TokenSpan("t.bin", 0, 900), TokenSpan("t.bin", 910, 1000), 256, "bytes", "0" * 64)
REFERENCE = Arm("bf16", "bf16", ArmRole.REFERENCE)
CANDIDATE = Arm("fp8", "fp8", native=False)
REPEAT = Arm("bf16 again", "bf16", ArmRole.REPEAT)


def training(*candidates: Arm, steps: int = 100, seeds: int = 5, margin: float = 0.01) -> Training:
    """A training of the reference, its bands, and these candidates."""
    request = TrainingRequest(steps=steps, seeds=seeds, margin=margin)
    arms = (REFERENCE, REPEAT, *(candidates or (CANDIDATE,)))
    return Training("t1", "2026-01-05T12:00:00Z", "fp8bench train", request, arms, CPU, Environment({}), TEXT, 1000)


def judged(lines_told: Iterable[StreamLine], of: Training | None = None, finished: bool = True) -> JudgedTraining:
    kept = StoredTraining(of or training(), tuple(lines_told), finished, "store/trainings/one/steps.jsonl")
    return JudgedTraining(kept)


def rows(arm: str, seed: int, losses: Sequence[float], seconds: float = 0.01, tokens: int = 192) -> Iterator[StepRow]:
    for step, loss in enumerate(losses):
        yield StepRow(arm, seed, step, loss, 1e-3, 1.0, 0.0, 10.0, 1e-3, 1.0, tokens, seconds)


def held_out(arm: str, seed: int, step: int, loss: float) -> Validation:
    return Validation(arm, seed, step, "held-out", loss, 1000)


def curve(steps: int, end: float, start: float = 5.5) -> list[float]:
    """Losses that fall fast, then slowly."""
    return [end + (start - end) * 0.5 ** (20 * step / steps) for step in range(steps)]


def lines(
    gaps: Mapping[str, Sequence[float]],
    steps: int = 100,
    held: Mapping[str, Sequence[float]] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> tuple[StreamLine, ...]:
    """Arms whose losses are above the reference's by these shares per seed, on training and held-out text.

    The reference's losses differ by seed. `seconds` is each arm's step time.
    """
    made: list[StreamLine] = []
    seeds = max(map(len, gaps.values()))
    held, seconds = {**gaps, **(held or {})}, seconds or {}
    for seed in range(seeds):
        base = curve(steps, 2.0 + 0.01 * seed)
        for arm, own in {REFERENCE.name: [0.0] * seeds, **gaps}.items():
            if seed >= len(own):
                continue
            made += rows(arm, seed, [loss * (1 + own[seed]) for loss in base], seconds.get(arm, 0.01))
            share = 0.0 if arm == REFERENCE.name else held[arm][seed]
            made.append(held_out(arm, seed, steps - 1, 2.1 * (1 + share)))
    return tuple(made)
