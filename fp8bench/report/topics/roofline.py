"""Compares each phase with the peaks of the device. Shows what limits it, and how much a precision could gain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from fp8bench import units
from fp8bench.analysis.roofline import (
    LimitingResource,
    PhaseRoofline,
    PossibleSpeedup,
    compute_possible_speedup,
    find_datasheet,
    find_phase_roofs,
)
from fp8bench.model import Limit, Rate, Run
from fp8bench.report.case_status import CaseStatus, find_case_status, speed_up
from fp8bench.report.columns import Col, ColumnList
from fp8bench.report.elements import Elements, Sentences, Text, bullet_list
from fp8bench.report.page.section import PRECISION_COLUMN, Material, iterate_titled_panels, section, table_of_cases
from fp8bench.report.panels import CaseValue, NamedCase, Panel, Result, list_cases
from fp8bench.report.words.naming import join_words, phase_words

# Sentences leave out a phase if its share of the step is smaller than this.
_MIN_STEP_SHARE = 0.02
# If a phase moves bytes at more than this share of the memory's peak rate, it must read from a cache.
_MAX_MEMORY_RATE_SHARE = 1.05


def describe_bound(roof: PhaseRoofline) -> str:
    """Returns what limits a phase, as 'memory-bound'. Returns 'served from cache' if the phase moves more bytes
    than memory could, and '' if unknown.
    """
    if roof.limiting_resource is None:
        return ""
    share_of_peak = roof.share_of_ceiling or roof.share_of_datasheet or 0.0
    if roof.limiting_resource is LimitingResource.MEMORY and share_of_peak > _MAX_MEMORY_RATE_SHARE:
        return "served from cache"
    return roof.limiting_resource.value


def describe_speed_limits_of_phases(panel: Panel) -> Sentences:
    """Yields a sentence about what limits the phases of a step, for each case that is not emulated and whose limits are
    known.
    """
    for case in panel.named_cases:
        limits_text = _describe_limits_of_phases(case)
        if limits_text and not case.is_emulated:
            yield f"{case.mode}{_show_setting(panel, case)} is {limits_text}."


def describe_possible_gains(panel: Panel) -> Sentences:
    for case in panel.named_cases:
        gain = _find_possible_gain(case)
        if gain is not None:
            yield _describe_possible_gain(case, _show_setting(panel, case), gain)


def _show_setting(panel: Panel, case: NamedCase) -> str:
    return f" at {case.setting_name}" if len(panel.groups) > 1 else ""


def explain_unknown_limits(panels: Iterable[Panel], run: Run) -> str:
    """Returns a sentence with the command that measures this machine's peaks, if steps were counted and timed but the
    peaks are missing. Otherwise returns ''.
    """
    roofs: list[PhaseRoofline] = []
    for case in list_cases(panels):
        if not case.is_emulated:
            if case.record.ceiling is not None and case.record.ceiling.rates:
                return ""
            roofs += find_phase_roofs(case.record, case.finding)
    if not roofs or any(roof.limiting_resource for roof in roofs):
        return ""
    threads_option = f" --threads {run.request.threads}" if run.request.threads != 1 else ""
    store_option_hint = ", with the same --store," if "--store" in run.command else ""
    return (
        f"The limits of phases are unknown: `fp8bench suite ceilings{threads_option}`{store_option_hint} measures this "
        "machine's peaks in less than a minute, and later runs compare with them."
    )


def _find_possible_gain(case: NamedCase) -> PossibleSpeedup | None:
    reference = case.reference_result
    if reference is None or find_case_status(reference) is not CaseStatus.REFERENCE:
        return None
    if case.is_reference or case.is_emulated:
        return None
    return compute_possible_speedup(case.record, case.finding, reference.record, reference.finding)


def cite_peak_rates(results: Sequence[Result]) -> Sentences:
    ceiling = next((result.record.ceiling for result in results if result.record.ceiling is not None), None)
    if ceiling is None:
        return
    if ceiling.rates:
        # If repetitions of a measurement differ much, the real peak may be higher than the measured one.
        unsteady_rates = [rate for rate in ceiling.rates if rate.runs and not rate.is_steady]
        rates_text = join_words(f"{describe_rate(rate)} by {units.percent(rate.spread)}" for rate in unsteady_rates)
        uncertainty = f". Some may be higher, because repeated measurements differ: {rates_text}" if rates_text else ""
        yield f"Ceilings were measured here{uncertainty}."
    datasheet = find_datasheet(ceiling.device)
    if datasheet is not None:
        rates_text = datasheet.cite_figures("dense", "bandwidth")
        yield f"Peaks are those of the {datasheet.name}'s {rates_text} ({datasheet.source}, {datasheet.date})."


def _describe_limits_of_phases(result: Result) -> str:
    """Returns what limits the phases of a case, as 'compute-bound in products (54% of the step, at 71% of its
    ceiling), memory-bound in ...'.
    """
    step_seconds = result.best_seconds or 0.0
    phases_by_bound: dict[str, list[str]] = {}
    for roof in sorted(find_phase_roofs(result.record, result.finding), key=lambda roof: -roof.seconds):
        limit_text = describe_bound(roof)
        if limit_text and roof.seconds >= _MIN_STEP_SHARE * step_seconds > 0:
            step_share = units.percent(roof.seconds / step_seconds, 0)
            phase = f"{phase_words(roof.count.phase)} ({step_share} of the step{_show_share_of_peak(roof)})"
            phases_by_bound.setdefault(limit_text, []).append(phase)
    return join_words(
        [f"{limit_text} in {join_words(phases, 20)}" for limit_text, phases in phases_by_bound.items()], 20
    )


def _show_share_of_peak(roof: PhaseRoofline) -> str:
    """Returns the share of its peak that a phase reaches, as ', at 71% of its ceiling' or ', above its ceiling'.
    Returns '' if no peak is known.
    """
    for share, peak in ((roof.share_of_ceiling, "its ceiling"), (roof.share_of_datasheet, "the datasheet's peak")):
        if share is not None:
            return f", above {peak}" if share > 1 else f", at {units.percent(share, 0)} of {peak}"
    return ""


def _show_share(share: float) -> str:
    """Returns a share of a peak as '71%', or 'above' for more than 100%, which a cache makes possible."""
    return "above" if share > 1 else units.percent(share, 0)


def _describe_possible_gain(case: NamedCase, setting: str, gain: PossibleSpeedup) -> str:
    """Compares the possible and the measured gain of a precision in a sentence, as "fp32's products are 54% of the step
    and at 71% of their ceiling: fp8 at its own ceiling would give at most 1.38x; it gives 1.21x".
    """
    speed = speed_up(case)
    measured_gain_text = "its measured gain is unclear"
    if speed is not None and find_case_status(case) is not CaseStatus.UNSURE:
        doubt_word = "perhaps " if case.finding.doubtful else ""
        measured_gain_text = f"it {doubt_word}gives {units.speed_up(speed.point)}"
    if gain.cast_bytes:
        product_speeds = (
            f"{units.speed_up(gain.speedup_without_casts)} as fast, "
            f"with the casts {units.speed_up(gain.speedup_with_casts)}"
        )
        moved_bytes = f"casts move {units.size(gain.cast_bytes)}, products {units.size(gain.product_bytes)}"
        measured_gain_text += f"; its products alone are {product_speeds} ({moved_bytes})"
    possible_gain_text = f"{'at most' if gain.is_upper_bound else 'about'} {units.speed_up(gain.max_speedup)}"
    return (
        f"{case.group.reference}'s products{setting} are {units.percent(gain.share, 0)} of the step and at "
        f"{units.percent(gain.share_of_ceiling, 0)} of their ceiling: {case.mode} at its own ceiling would give "
        f"{possible_gain_text}; {measured_gain_text}."
    )


@section("roofline", "Roofline", 76)
def roofline_section(material: Material) -> Elements:
    """The table compares counted FLOPs, bytes and launches per second of the best case with the peaks measured on this
    device and those of its datasheet. Emulated cases are left out: their time is not that of the format.
    """
    for title, panel in iterate_titled_panels(material):
        cases = []
        for case in panel.named_cases:
            roofs = () if case.is_emulated else find_phase_roofs(case.record, case.finding)
            if any(roof.limiting_resource for roof in roofs):
                cases.append((case, roofs))
        if cases:
            yield from _panel_roofline(title, panel, cases)
    unknown_limit_hints = [explain_unknown_limits(entry.panels, entry.run) for entry in material.entries]
    yield from map(Text, filter(None, dict.fromkeys(unknown_limit_hints)))


def _panel_roofline(title: str, panel: Panel, cases: Sequence[tuple[NamedCase, Sequence[PhaseRoofline]]]) -> Elements:
    # The table shows what limits the speed of each phase, so sentences are only needed for possible improvements.
    yield from bullet_list(describe_possible_gains(panel))
    yield from map(Text, cite_peak_rates([case for case, _ in cases]))

    bytes_hint = "counted bytes over the time: a cache may give more than memory"
    cols: ColumnList[CaseValue[PhaseRoofline]] = [
        PRECISION_COLUMN,
        Col("phase", lambda row: phase_words(row.value.count.phase)),
        Col("time", "value.seconds", unit="s", hint="best case"),
        Col("FLOP/s", "value.flop_rate", show=partial(units.count, unit="FLOP/s"), hint="counted FLOPs over the time"),
        Col("B/s", lambda row: row.value.byte_rate or None, show=partial(units.count, unit="B/s"), hint=bytes_hint),
        Col("FLOP/B", "value.intensity", show=units.count, hint="FLOPs for each byte"),
        Col(
            "of ceiling",
            "value.share_of_ceiling",
            show=_show_share,
            hint="time at the peaks measured here / measured time",
        ),
        Col(
            "of datasheet",
            "value.share_of_datasheet",
            show=_show_share,
            hint="time at the datasheet's peaks / measured time",
        ),
        Col(
            "limit",
            lambda row: describe_bound(row.value) or None,
            hint="the resource that would take at least half of the measured time even if the device ran at its peak",
        ),
    ]
    yield from table_of_cases(f"roofline-{panel.suite}", f"{title}: each phase against the ceilings", cols, cases)


UNIT_OF_LIMIT = {**dict.fromkeys(Limit, "B/s"), Limit.PRODUCT: "FLOP/s", Limit.LAUNCH: "launches/s"}


def describe_spread(rate: Rate) -> str:
    """Returns how much repeated measurements of a peak differ, as 'spread 1.5% over 5 runs'. Appends ': no bound' if
    they differ too much.
    """
    unsteady_remark = "" if rate.is_steady else ": no bound"
    return f"spread {units.percent(rate.spread)} over {len(rate.runs)} runs{unsteady_remark}"


def describe_shape(rate: Rate) -> str:
    if rate.limit is Limit.LAUNCH:
        return "one element"
    tensor_shape_text = (
        "x".join(map(str, rate.shape)) if rate.limit is Limit.PRODUCT else f"arrays of {units.size(rate.shape[0])}"
    )
    return f"{tensor_shape_text}, the best of {rate.searched} searched"


def describe_rate(rate: Rate) -> str:
    """Returns the name of a measured peak rate, as 'product bf16' for matrix products in bf16."""
    if rate.limit is Limit.TRIAD:
        return "triad (adds two arrays)"
    return f"{rate.limit.value} {rate.precision}".strip()
