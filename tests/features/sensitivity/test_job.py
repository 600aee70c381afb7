"""Which cases a study trains, what a fault costs, and when its search for a map ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.option_types import precision_map
from fp8bench.errors import UsageError, WorkerError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.features.sensitivity.command import make_trial_command, render_page
from fp8bench.features.sensitivity.job import (
    WEIGHT_DRAW_COUNT,
    StudyRequest,
    group_layers,
    plan_sensitivity_study,
    write_map,
)
from fp8bench.features.sensitivity.study import FORMATS, LoweredUnit, SensitivityStudy
from fp8bench.measure.handle import Worker
from fp8bench.model import Case, DeviceFacts, Request
from fp8bench.protocols import Layer, find_map_key
from fp8bench.registry import workloads
from fp8bench.report.terminal.layout import render
from tests.counts import for_each
from tests.facts import CPU

Told = list[tuple[int, int, str, str]]
LAYERS = workloads.get("transformer").layers({"size": "nano"})
ASKED = Request("transformer", ("fp8",), (), "bf16", (("size", ("nano",)),))
LOST = WorkerLost("the worker crashed during 'losses'")


@dataclass
class Trainer(Worker):
    """Gives the loss that a function has for the layers that are low, in every step; an exception is raised."""

    loss: Callable[[frozenset[str]], float | WorkerError]
    draws: tuple[float, ...] = (1.0, 1.01, 1.0)
    log: list[tuple[str, str, tuple[tuple[str, str], ...], int]] = field(default_factory=list)
    limits: set[float] = field(default_factory=set)
    restarts: int = 0

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        self.limits.add(limit)
        return getattr(self, f"_{name}")(*arguments)

    def close(self) -> None:
        """Nothing is open."""

    def restart(self) -> None:
        self.restarts += 1

    def _gradient_error(self, case: Case, reference: Case, facts: DeviceFacts) -> float:
        assert (reference.precision, reference.precision_map) == ("bf16", ())
        return len(low_of(case)) / 100

    def _losses(self, case: Case, facts: DeviceFacts, steps: int, draw: int) -> tuple[float, ...]:
        self.log.append((case.mode, case.precision, case.precision_map, draw))
        if draw:
            return (self.draws[draw],) * steps
        outcome = self.loss(low_of(case))
        if isinstance(outcome, WorkerError):
            raise outcome
        return (outcome,) * (steps if math.isfinite(outcome) else 2)


def low_of(case: Case) -> frozenset[str]:
    """The layers of a case that are in fp8."""
    keys = dict(case.precision_map)

    def mode(layer: Layer) -> str:
        key = find_map_key(layer, keys)
        return keys[key] if key is not None else "bf16" if layer.high else case.precision

    return frozenset(layer.name for layer in LAYERS if mode(layer) == "fp8")


def studied(
    trainer: Trainer, by: LoweredUnit = LoweredUnit.LAYER, tolerance: float = 0.05
) -> tuple[SensitivityStudy, Told]:
    reports: Told = []
    runs = plan_sensitivity_study(StudyRequest(ASKED, by, 5, tolerance), (CPU,), None, trainer)
    runs.run(lambda *words: reports.append(words))
    return runs.study, reports


def costs(*bad: str) -> Callable[[frozenset[str]], float]:
    """Each of these layers costs 10% when it is low."""
    return lambda low: 1.0 + 0.1 * len(low & set(bad))


def test_a_study_trains_the_reference_its_draws_every_layer_and_all_of_them() -> None:
    trainer = Trainer(costs())
    study, reports = studied(trainer)
    assert [mode for mode, *_ in trainer.log] == [
        "bf16",
        *["bf16"] * WEIGHT_DRAW_COUNT,
        *(f"bf16{{{layer.name}=fp8}}" for layer in LAYERS),
        "fp8{head=fp8}",
    ]
    assert [draw for *_, draw in trainer.log] == [0, 1, 2, *[0] * 10]
    assert [trial.low for trial in study.probes] == [(layer.name,) for layer in LAYERS]
    assert [trial.gradient_error for trial in study.probes] == [0.01] * 9
    assert study.noise == pytest.approx(0.01) and study.suggestion is None
    assert study.candidates[0].gradient_error == 0.09 and trainer.restarts == 0
    assert len(trainer.limits) == 1 and min(trainer.limits) > 5 * 60
    assert reports[0] == (0, 13, "trainings", "training with the reference")
    assert reports[-1] == (12, 13, "trainings", "training with all layers")


def test_a_study_by_kind_lowers_whole_kinds() -> None:
    trainer = Trainer(costs())
    study, _ = studied(trainer, LoweredUnit.KIND)
    assert [trial.precision_map for trial in study.probes] == [((kind, "fp8"),) for kind in ("attn", "mlp", "head")]
    assert [len(trial.low) for trial in study.probes] == [4, 4, 1]
    assert len(group_layers(LAYERS, LoweredUnit.KIND)) == 3


def test_the_worst_are_taken_out_until_a_map_keeps_the_loss() -> None:
    bad = ("blocks.1.mlp.down", "head", "blocks.0.attn.out")
    trainer = Trainer(costs(*bad))
    study, reports = studied(trainer)
    gaps = [study.gap(trial) for trial in study.candidates]
    assert gaps == [pytest.approx(gap, abs=1e-9) for gap in (0.3, 0.2, 0.1, 0.0)]
    assert study.suggestion is study.candidates[-1]
    assert set(study.suggestion.low) == {layer.name for layer in LAYERS} - set(bad)
    assert set(study.suggestion.precision_map) == {("blocks.1.mlp.down", "bf16"), ("blocks.0.attn.out", "bf16")}
    assert {frozenset(dict(trial.precision_map)) for trial in study.candidates} == {
        frozenset(dict(precision_map)) for mode, precision, precision_map, _ in trainer.log if precision == "fp8"
    }
    assert reports[-1][:2] == (15, 16)


def test_a_suggestion_without_a_map_names_what_stays_high(tmp_path: Path) -> None:
    """Suites keep the head high by default, so a map with a high head gives the same low layers."""
    study, _ = studied(Trainer(costs("head")))
    assert study.suggestion is not None and study.suggestion.precision_map == ()
    assert study.explicit_map(study.suggestion) == (("head", "bf16"),)
    assert low_of(Case("x", (), "fp8", "cpu", (("head", "bf16"),))) == {*study.suggestion.low}
    assert make_trial_command(study, study.suggestion).endswith("--precision-map head=bf16")
    write_map(study, tmp_path / "map.txt")
    assert precision_map(str(tmp_path / "map.txt")) == (("head", "bf16"),)
    with pytest.raises(UsageError, match="no map is suggested"):
        write_map(replace(study, candidates=()), tmp_path / "none.txt")


def test_a_tolerance_that_no_map_keeps_ends_with_the_last_layer() -> None:
    study, _ = studied(Trainer(lambda low: 1.0 + 0.1 * bool(low)))
    assert study.suggestion is None and [len(trial.low) for trial in study.candidates] == list(range(9, 0, -1))


@for_each(
    ("fault", "reason", "restarts"),
    [
        (math.nan, "the loss is nan in step 1", 0),
        (math.inf, "the loss is inf in step 1", 0),
        (LOST, "the worker crashed", 1),
        (WorkerHung("no answer to 'losses' within 60 s"), "no answer", 1),
        (WorkerFault("ValueError", "no such thing"), "ValueError: no such thing", 1),
        (WorkerFault("OutOfMemoryError", "no memory left", out_of_memory=True), "OutOfMemoryError: no memory left", 0),
    ],
    ids=str,
)
def test_a_run_that_fails_is_a_row_and_its_layer_the_first_to_go(
    fault: float | WorkerError, reason: str, restarts: int
) -> None:
    trainer = Trainer(lambda low: fault if "blocks.1.attn.qkv" in low else 1.0)
    study, _ = studied(trainer)
    assert study.ranking[0].name == "blocks.1.attn.qkv" and study.ranking[0].failure.startswith(reason)
    assert [bool(trial.failure) for trial in study.candidates] == [True, False]
    assert study.suggestion is not None and len(study.suggestion.low) == 8
    assert trainer.restarts == 2 * restarts


def test_without_a_reference_nothing_can_be_told_and_without_a_draw_the_others_can() -> None:
    trainer = Trainer(lambda low: LOST if not low else 1.0)
    study, _ = studied(trainer)
    assert study.baseline.failure and not study.draws and not study.probes and len(trainer.log) == 1
    study, _ = studied(Trainer(costs(), draws=(1.0, math.nan, 1.03)))
    assert study.draws[0].failure == "the loss is nan in step 1" and study.noise == pytest.approx(0.03)


@dataclass
class Formats(Trainer):
    """Gives gradient errors by layer and format; without an entry all formats have the same."""

    errors: dict[tuple[str, str], float | WorkerError] = field(default_factory=dict)

    def _gradient_error(self, case: Case, reference: Case, facts: DeviceFacts) -> float:
        ((layer, form), *others) = case.precision_map or (("", ""),)
        outcome = self.errors.get((layer, form), 0.1) if not others and case.precision == "bf16" else 0.2
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome


def test_each_layer_gets_the_cheapest_format_that_is_nearly_the_best(tmp_path: Path) -> None:
    up, down = "blocks.0.mlp.up", "blocks.0.mlp.down"
    errors: dict[tuple[str, str], float | WorkerError] = {
        (up, "fp8"): 0.5, (up, "fp8-e4m3"): 0.112, (up, "fp8-rowwise"): 0.109,
        (down, "fp8"): LOST, (down, "fp8-e4m3"): 0.3,
    }  # fmt: skip
    trainer = Formats(costs(), errors=errors)
    study, _ = studied(trainer, LoweredUnit.FORMAT)
    assert len(study.probes) == len(LAYERS) * len(FORMATS) and trainer.restarts == 1
    proposed = {layer.name: "fp8" for layer in LAYERS} | {up: "fp8-e5m2", down: "fp8-e5m2"}
    assert study.proposed_formats == proposed
    candidate, everywhere = study.candidates
    assert dict(candidate.precision_map) == {"head": "fp8", up: "fp8-e5m2", down: "fp8-e5m2"}
    assert everywhere.precision_map == (("head", "fp8"),) and study.suggestion == candidate
    assert f"{up}=fp8-e5m2" in make_trial_command(study, candidate)
    text = " ".join(render(render_page(study)).split())
    assert f"{up} 50.00% 11.20% 10.00% 10.90% 10.00% fp8-e5m2" in text and f"{down} - 30.00% 10.00%" in text
    write_map(study, tmp_path / "map")
    assert dict(precision_map(str(tmp_path / "map"))) == dict(candidate.precision_map)
