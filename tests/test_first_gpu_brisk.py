"""The nine minutes on a GPU that is lent, rehearsed: order, computed seconds, archives, and published figures."""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.errors import EXIT_FAILED
from fp8bench.measure import group as group_module
from fp8bench.measure.device_watch import Settler
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.sensors.energy import Source, SourceKind
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.windows import WindowPass, make_window_rule
from fp8bench.model import DeviceFacts, Group
from fp8bench.model.codec import encode
from fp8bench.model.stopping import make_stopping_rule
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentObserver
from fp8bench.registry import precisions
from suites import first_gpu
from suites.first_gpu import ARCHIVE, choose_steps, only_native, run_steps, seconds_of, unpack, write_results
from suites.first_gpu_brisk import BRISK_STEPS, STEPS, clock_of, request_of_words
from suites.first_gpu_cards import MAMF, TE_FORWARD, compare, describe_conditions, vllm_ratio
from suites.first_gpu_steps import (
    NATIVE,
    PROBE,
    FirstStep,
    NoFigure,
    StepFiles,
    bandwidth_share,
    sustained,
)
from suites.trials import ROOT
from tests.counts import for_each
from tests.facts import A100, B200, gpu
from tests.fakes import lasting
from tests.measure.test_brisk import Gpu, SlowCounter, Stopwatch
from tests.plans import cases_of

L4 = gpu("NVIDIA L4", (8, 9))
REPORT = ROOT / "reports" / "gpu_h200_202611"


def probe_of(facts: DeviceFacts, **driver: str) -> dict[str, Any]:
    """The probe's output for a device."""
    supports = {name: precisions.get(name).support(facts) for name in precisions.names()}
    return {
        "device": encode(facts),
        "computes": True,
        "driver": {"power.limit": "700.00 W", "power.max_limit": "700.00 W", "clocks.max.sm": "1980 MHz", **driver},
        "overheads": {"marker_on": 5e-6},
        "precisions": {name: [support.level.value, support.reason] for name, support in supports.items()},
        "energy": {"source": "counter", "window_watts": 690.0, "nvml_watts": 691.0},
        "torch": "2",
        "commit": "c",
    }


NAMED_H200 = gpu("NVIDIA H200", (9, 0))
STARTED_H200 = probe_of(NAMED_H200)


class Programme:
    """Steps that take their modelled seconds on a fake clock, and write files."""

    def __init__(self, folder: Path, probe: Mapping[str, Any], slower: float = 0.9) -> None:
        self.folder = folder
        self.probe = probe
        self.slower = slower
        self.now = 0.0
        self.begun: list[tuple[str, float]] = []
        self.archived: list[list[str]] = []

    def clock(self) -> float:
        return self.now

    def take(self, files: StepFiles, limit: float, native: Mapping[str, str]) -> dict[str, Any]:
        if (self.folder / ARCHIVE).exists():
            self.archived.append(names_in(self.folder / ARCHIVE))
        self.begun.append((files.step.name, limit))
        seconds = self.slower * seconds_of(files, self.probe)
        self.now += seconds
        if files.step is PROBE:
            files.path("json").write_text(json.dumps(self.probe))
        files.path("out").write_text(f"{files.step.name}\n")
        state = {"state": "ended", "attempts": 1, "overruns": 0, "code": 0, "seconds": seconds}
        files.write(state)
        return state


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as file:
        return file.getnames()


@pytest.fixture
def programme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programme:
    new_programme = Programme(tmp_path, STARTED_H200)
    monkeypatch.setattr(first_gpu, "take", new_programme.take)
    return new_programme


def test_what_is_open_comes_first_and_all_of_it_ends_in_time(
    programme: Programme, capsys: pytest.CaptureFixture[str]
) -> None:
    run_steps(BRISK_STEPS, programme.folder, 520.0, clock=programme.clock)
    names = [name for name, _ in programme.begun]
    assert names[:6] == ["probe", "conform", "casts", "forward", "model", "model-compiled"] and programme.now <= 520
    for name, limit in programme.begun:
        computed = seconds_of(step_named(name), STARTED_H200)
        assert computed <= limit and (name in ("probe", "conform") or limit <= max(60, 2 * computed))
    printed = capsys.readouterr().out
    left_out = [step.name for step in BRISK_STEPS if step.name not in names]
    assert left_out and all(f"{name}: left out, it takes " in printed for name in left_out)


def step_named(name: str) -> StepFiles:
    return StepFiles(next(step for step in STEPS if step.name == name), Path("/nowhere"))


def test_an_archive_after_each_step_takes_a_second_call_on(
    programme: Programme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_steps(BRISK_STEPS, programme.folder, 520.0, clock=programme.clock)
    done = [name for name, _ in programme.begun]
    # Each archive holds all previous steps, and never itself.
    for before, names in zip(range(1, len(done)), programme.archived, strict=True):
        assert {f"{name}.state.json" for name in done[:before]} <= {*names} and ARCHIVE not in names
    elsewhere = tmp_path / "second"
    elsewhere.mkdir()
    unpack(programme.folder / ARCHIVE, elsewhere)
    second = Programme(elsewhere, STARTED_H200)
    monkeypatch.setattr(first_gpu, "take", second.take)
    run_steps(BRISK_STEPS, elsewhere, 520.0, clock=second.clock)
    left_out = [step.name for step in BRISK_STEPS if step.name not in done]
    assert second.begun[0][0] == left_out[0] and {name for name, _ in second.begun}.isdisjoint(done)
    with pytest.raises(SystemExit, match="already holds steps"):
        unpack(programme.folder / ARCHIVE, elsewhere)
    (tmp_path / "third").mkdir()
    with pytest.raises(SystemExit, match="could not be read"):
        unpack(programme.folder / "probe.out", tmp_path / "third")


def test_only_the_named_steps_are_taken_in_the_order_of_their_names(programme: Programme) -> None:
    steps = choose_steps(BRISK_STEPS, "crossing,forward")
    run_steps(steps, programme.folder, 520.0, clock=programme.clock)
    assert [name for name, _ in programme.begun] == ["probe", "crossing", "forward"]
    assert choose_steps(BRISK_STEPS, None) == [*BRISK_STEPS]
    with pytest.raises(SystemExit, match="unknown step 'nosuch'"):
        choose_steps(BRISK_STEPS, "forward,nosuch")


def planned_groups(step: FirstStep, facts: DeviceFacts) -> tuple[Group, ...]:
    native = {name: level for name, (level, _) in probe_of(facts)["precisions"].items()}
    words = [only_native(word, native) for word in step.words.split()]
    return make_plan(request_of_words(words[1:]), (facts,), "text").groups


SUITE_STEPS = [step for step in STEPS if step.words.startswith("fp8bench suite ")]
SUITE_STEPS = [step for step in SUITE_STEPS if "suite ceilings" not in step.words]


@for_each("facts", [A100, L4, NAMED_H200, B200])
def test_no_minute_is_spent_on_emulation(facts: DeviceFacts) -> None:
    native = {name: level for name, (level, _) in probe_of(facts)["precisions"].items()}
    for step in SUITE_STEPS:
        missing = step.missing_units(native)
        assert bool(missing) == (facts is A100), (step.name, missing)
        if not missing:
            cases = [case for case in cases_of(planned_groups(step, facts)) if case.runs]
            assert cases and not any(case.support.is_emulated for case in cases), step.name
    assert all(NATIVE in step.words for step in SUITE_STEPS)


def test_a_step_that_a_gpu_has_no_units_for_is_a_row_and_takes_no_time(programme: Programme) -> None:
    programme.probe = probe_of(A100)
    run_steps(BRISK_STEPS, programme.folder, 520.0, clock=programme.clock)
    assert [name for name, _ in programme.begun] == ["probe", "test-faults", "test-triton-casts"]
    assert write_results(BRISK_STEPS, programme.folder) == EXIT_FAILED
    table = (programme.folder / "table.md").read_text()
    assert "left out: this GPU multiplies none of fp8, fp8-rowwise, fp8:backend=torchao" in table
    assert "Nothing is known of this card" in table


@for_each("name", ["casts", "forward", "model", "serving", "crossing", "best-products", "gpt2-124m", "attention"])
def test_groups_on_a_virtual_clock_end_within_the_computed_seconds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_named(name).step
    groups = planned_groups(step, NAMED_H200)
    clock = clock_of(NAMED_H200)
    request = request_of_words([word.removeprefix(NATIVE) for word in step.words.split()][1:])
    monkeypatch.setattr("tests.measure.powered.WATTS", defaultdict(lambda: 690.0))
    power = SlowCounter()
    device = Gpu(power)
    sources = (Source(SourceKind.COUNTER, power.read),) if request.energy else ()
    meter = Meter(sources, device, "", power.clock)
    timing = Stopwatch(power, {})
    untimed = Stopwatch(power, {})
    monkeypatch.setattr(group_module, "Settler", partial(Settler, clock=power.clock.now))
    monkeypatch.setattr(group_module, "WindowPass", partial(WindowPass, _clock=power.clock.now))
    begun = power.clock.now()
    for group in groups:
        scripts = {case.case.mode: lasting(1e3 * clock.step(case)) for case in group.cases}
        timing.scripts = untimed.scripts = scripts
        method = MeasurementMethod(
            rule=make_stopping_rule(False, 24, None, True),
            judge=is_case_decided,
            seed=0,
            windows=make_window_rule(request, len(groups)),
            warm_up_seconds=5.0,
            brisk=True,
        )
        facts = {group.cases[0].case.device: NAMED_H200}
        device.busy_since = power.clock.now()
        GroupMeasurement(group, facts, timing, SilentObserver(), method, meter, untimed).run()
    seconds = power.clock.now() - begun + clock.command
    computed = seconds_of(step_named(name), STARTED_H200)
    assert seconds <= computed <= 3 * seconds, (name, round(seconds), round(computed))


H200_AT_CAP = {"clock": 1.46e9, "power": 692.0}


@for_each(
    ("number", "published", "device", "clocks", "words"),
    [
        (780.0, MAMF["bf16"], STARTED_H200, H200_AT_CAP, "within 794.5 (MAMF-finder, H200; best of many shapes, "),
        (652.0, MAMF["bf16"], STARTED_H200, H200_AT_CAP, ": clock 1.46 GHz of 1.98 GHz at the power cap"),
        (652.0, MAMF["bf16"], STARTED_H200, {"clock": 1.97e9}, ": nothing known explains it"),
        (1.49, TE_FORWARD, STARTED_H200, {}, ": another card (NVIDIA H200)"),
        (500.0, MAMF["bf16"], probe_of(NAMED_H200, **{"power.limit": "450.00 W"}), {}, ": power cap 450 W of 700 W"),
        (2.2, vllm_ratio(16, True), STARTED_H200, {}, "within 2.23 (vllm 17126"),
    ],
)
def test_a_figure_is_held_against_a_published_one(
    number: float, published: Any, device: dict[str, Any], clocks: dict[str, float], words: str
) -> None:
    told = compare(number, published, device, clocks)
    assert told.startswith(words) if not words.startswith(":") else told.startswith("below ") and told.endswith(words)


@for_each(
    ("device", "words"),
    [
        (STARTED_H200, ""),
        (probe_of(NAMED_H200, **{"mig.mode.current": "Enabled"}), "MIG is on: this is a part of a GPU"),
        (probe_of(NAMED_H200, **{"power.limit": "500.00 W"}), "The power cap is 500 W of 700 W"),
        (probe_of(NAMED_H200, **{"ecc.mode.current": "Disabled"}), "ECC is off"),
        ({**STARTED_H200, "energy": {"source": "instant"}}, "NVML has no energy counter here"),
        ({**STARTED_H200, "energy": {"why": "no pynvml"}}, "Energy could not be measured (no pynvml)"),
        (probe_of(gpu("Test GPU", (9, 0))), "Nothing is known of this card"),
        ({**STARTED_H200, "driver": {"why": "no nvidia-smi"}}, ""),
    ],
)
def test_what_changes_the_meaning_of_figures_is_said(device: dict[str, Any], words: str) -> None:
    told = [*describe_conditions(device)]
    assert len(told) == bool(words) and all(sentence.startswith(words) for sentence in told)


def test_sustained_ratios_are_read_from_energy_windows(tmp_path: Path) -> None:
    files = StepFiles(step_named("forward").step, tmp_path)
    runs = files.store / "runs" / "box"
    runs.mkdir(parents=True)
    copy(REPORT / "runs" / "7816318e.jsonl", runs / "20261126T120000.000Z-00000000-7816318e.jsonl")
    csv = ["precision,level,status,reason,metric,phase,params,median_in_unit"]
    for mode in ("bf16", "fp8"):
        csv += [f"{mode},native,ok,,time,step,{place},1" for place in places()]
    files.path("csv").write_text("\n".join(csv))
    measured = sustained("bf16", "fp8")(files)
    assert measured.text == "1.49 (by case 1.33, 1.63, 1.4) at 1.57 GHz, 694 W"
    with pytest.raises(NoFigure, match="fp8-delayed was not measured"):
        sustained("bf16", "fp8-delayed")(files)


def places() -> list[str]:
    lines = ((4096, 4096), (16384, 4096), (4096, 16384))
    return [f"m=15872 n={n} k={k} product=forward operands=cast layout=contiguous values=normal" for n, k in lines]


def test_casts_are_held_against_the_cards_copy(tmp_path: Path) -> None:
    files = StepFiles(step_named("casts").step, tmp_path)
    StepFiles(PROBE, tmp_path).path("json").write_text(json.dumps(STARTED_H200))
    head = "precision,level,status,reason,metric,phase,params,median_in_unit\n"
    seconds = 15872 * 16384 * 3 / (0.8 * 4e12)
    row = f"fp8-rowwise,native,ok,,time,step,rows=15872 columns=16384 source=bf16,{seconds}\n"
    files.path("csv").write_text(head + row)
    measured = bandwidth_share("fp8-rowwise", 3)(files)
    assert measured.number == pytest.approx(80.0) and measured.text == "80%, 3.2 of 4 TB/s"
    StepFiles(PROBE, tmp_path).path("json").write_text(json.dumps(probe_of(gpu("Test GPU", (9, 0)))))
    with pytest.raises(NoFigure, match="copy bandwidth is unknown"):
        bandwidth_share("fp8-rowwise", 3)(files)
