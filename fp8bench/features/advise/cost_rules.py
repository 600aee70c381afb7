"""Rules about what a precision costs beside time: memory, energy, and whether the model still learns."""

from __future__ import annotations

from fp8bench import units
from fp8bench.analysis.energy import Demand, energy_ratio, why_no_energy
from fp8bench.features.advise.basis import Basis, Beside
from fp8bench.features.advise.rule import Rule, Told
from fp8bench.features.advise.values import Ground, Met
from fp8bench.features.sensitivity.study import Study, Trial
from fp8bench.features.train.verdicts.judging import Learned
from fp8bench.features.train.verdicts.verdicts import ArmVerdict
from fp8bench.model import MemoryRole, Status

# A saving of less is called none.
_LEAST_SAVING = 0.01
_COPIES = {
    MemoryRole.LOW_WEIGHTS: "low-precision copies of weights",
    MemoryRole.LOW_ACTIVATIONS: "low-precision copies of activations",
}
_KEPT = {MemoryRole.WEIGHTS: "weights", MemoryRole.OPTIMIZER: "optimizer state"}


def _memory(one: Beside, basis: Basis) -> Told | str:
    if one.emulated:
        return "emulated here: its memory is the cost of emulation"
    lead = one.lead
    if one.record.memory is None or lead is None or lead.memory is None or not lead.memory.peak:
        return "no memory was measured"
    share = one.record.memory.peak / lead.memory.peak
    roles, before = dict(one.record.memory.roles), dict(lead.memory.roles)
    kept = [
        f"{words} ({units.size(roles[role])})"
        for role, words in _KEPT.items() if roles.get(role) and roles[role] >= before.get(role, 0)
    ]  # fmt: skip
    copies = [f"{words} ({units.size(roles[role])})" for role, words in _COPIES.items() if roles.get(role)]
    staying = f"what stays: {', '.join(kept)}" if kept else ""
    more = "; ".join(filter(None, (staying, f"what comes on top: {', '.join(copies)}" if copies else "")))
    figure = f"{units.ratio(share)} of {lead.case.mode}'s peak" + (f"; {more}" if more else "")
    grounds = (Ground(one.row, f"peak {units.size(one.record.memory.peak)}"),
               Ground(lead.case.id, f"peak {units.size(lead.memory.peak)}"))  # fmt: skip
    return Told(Met.YES if share <= 1 - _LEAST_SAVING else Met.NO, figure, grounds)


def _energy(one: Beside, basis: Basis) -> Told | str:
    labels = [label for finding in (one.finding, one.lead_finding) if finding is not None for label in finding.labels]
    found = energy_ratio(one.record, one.lead, labels)
    if one.emulated:
        return "emulated here: its joules are the cost of emulation"
    if found is None:
        return why_no_energy(one.record) if one.record.energy is not None else "no energy was measured"
    met = {Demand.LESS: Met.YES, Demand.MORE: Met.NO, Demand.UNCLEAR: Met.UNCLEAR}[found.demand]
    ends = f"[{units.significant(found.low)}, {units.significant(found.high)}]"
    figure = f"{units.ratio(found.point)} {ends} of the joules of a step" + (f": {found.why}" if found.why else "")
    return Told(met, figure, (Ground(one.row, figure),))


def _error(one: Beside, basis: Basis) -> Told | str:
    """A relative error says what a precision costs in numbers, and no more: what it may be, the training says."""
    known = {each.metric: max(each.samples) for each in one.record.measurements
             if each.metric.endswith("_error") and each.samples}  # fmt: skip
    if one.record.status is not Status.OK or not known:
        return "no error was measured"
    words = ", ".join(f"{name.replace('_', ' ')} {units.relative_error(value)}" for name, value in known.items())
    finite = all(value < float("inf") for value in known.values()) and not one.record.not_finite
    return Told(Met.YES if finite else Met.NO, words, (Ground(one.row, words),))


def study_of(one: Beside, basis: Basis) -> Study | None:
    """The newest study of this workload, device and precision; the same model where that is one of its parameters."""
    case = one.record.case
    params = dict(case.params)
    fitting = [
        study for study in basis.studies
        if (study.workload, study.low, study.device) == (case.workload, case.precision, case.device)
        and all(params.get(name, value) == value for name, value in study.params if name in ("size", "make"))
        and not study.baseline.failure
    ]  # fmt: skip
    return max(fitting, key=lambda study: study.started, default=None)


def tried_as(one: Beside, study: Study) -> Trial:
    """The candidate that has the layers low which the case has, by its map; else the one with all of them."""
    return next((each for each in study.candidates if each.precision_map == one.record.case.precision_map),
                study.candidates[0])  # fmt: skip


def _layers(one: Beside, basis: Basis) -> Told | str | None:
    study = study_of(one, basis)
    if study is None and not one.trains:
        return None
    if study is None or not study.candidates:
        return "no layer was tried alone"
    row = f"sensitivity study {study.path or study.started}"
    whole = tried_as(one, study)
    gap = study.gap(whole)
    told = "none" if gap is None else units.change(1 + gap)
    noise = units.percent(study.noise or 0.0)
    figure = f"layers low: {len(whole.low)}, loss {told} beside a noise of {noise} in {study.steps} steps"
    grounds = (Ground(row, figure),)
    if study.undecided:
        return Told(Met.UNCLEAR, f"{figure}: no layer can be told from another", grounds)
    return Told(Met.YES if study.keeps(whole) else Met.NO, figure, grounds)


def arm_of(one: Beside, basis: Basis) -> ArmVerdict | None:
    """What the training says of an arm in this mode with no setting of its own; else of the first one in it."""
    if basis.training is None:
        return None
    arms = [arm for arm in basis.training.found.arms if arm.arm.precision == one.mode]
    return min(arms, key=lambda arm: len(arm.arm.settings), default=None)


_LEARNS = {
    Learned.WITHIN_NOISE: Met.YES, Learned.BETTER: Met.YES, Learned.WORSE: Met.NO, Learned.DIVERGED: Met.NO,
}  # fmt: skip


def _learns(one: Beside, basis: Basis) -> Told | str | None:
    if not one.trains:
        return None
    arm = arm_of(one, basis)
    if arm is None or basis.training is None:
        return "no training had an arm in it"
    judged = arm.judged
    gap = judged.gap
    figure = str(judged.learned)
    if gap is not None and gap.decides is not None:
        low, high = units.change(1 + gap.decides.low), units.change(1 + gap.decides.high)
        figure += f": loss {units.change(1 + gap.point)} [{low}, {high}] over {gap.pairs} seeds"
    training = basis.training.kept.training
    model = training.request.settings.model
    ground = Ground(f"training {training.id}, arm {arm.arm.name}", f"{figure}, {model}, {training.request.steps} steps")
    return Told(_LEARNS.get(judged.learned, Met.UNCLEAR), figure, (ground,))


RULES = (
    Rule(
        "memory", "Does it save memory?", _memory, "{again}",
        "Training in FP8 keeps weights and optimizer state, and adds copies: published peaks are 1.00 of bf16's.",
    ),
    Rule(
        "energy", "Does it save energy?", _energy,
        "{again}, where a device tells its energy",
        "A device at its power limit trades clocks for width.",
    ),
    Rule(
        "errors", "Are all results finite?", _error, "{again}",
        "The error orders formats; whether it does harm, a training says.",
        of_speed=False,
    ),
    Rule(
        "layers", "Do all layers bear it?", _layers, "{study}",
        "Heads, routers, first and last layers are those that published recipes leave high.",
        of_speed=False,
    ),
    Rule(
        "learns", "Does it still learn?", _learns, "fp8bench train --dtypes {high},{mode} --seeds 5",
        "A short training of one seed tells nothing: seeds differ by as much as formats.",
        of_speed=False,
    ),
)  # fmt: skip
