"""An audit as a page: the verdict first, then a line for each check, and what failed with its smallest input."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from fp8bench import units
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome
from fp8bench.model import DeviceFacts
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import json_line
from fp8bench.report.elements import Column, Field, Page, Part, Table, Text, Tone, printable

_TONES = {AuditOutcome.PASS: Tone.GOOD, AuditOutcome.FAIL: Tone.BAD, AuditOutcome.CANNOT_TELL: Tone.DOUBT}
_LEGEND = (
    "PASS: every result is what the promised casts and products give, up to the order of sums, or has their error",
    "FAIL: it is not; the code says which known mistake explains all of it, or what is wrong",
    "CANNOT TELL: it raised, crashed or did not answer where it should have",
    "error: how far results are from the exact product of what went in; expected: how far the emulation is",
    "other data: the same call on zeros, ones, integers and two distributions; work: operators of torch that it calls",
    "too-good: a smaller error than this precision can have: a wider one ran; too-bad: a larger one",
)


def page_of(facts: DeviceFacts, audit: Audit) -> Page:
    """Of one callable on one device."""
    signature = audit.signature
    precision = f" in {signature.precision}" * bool(signature.precision)
    title = f"audit of {audit.target}: {signature.kind.value}{precision} on {facts.key} ({facts.name})"
    failed = [one for one in audit.findings if one.outcome is not AuditOutcome.PASS]
    remarks = [one for one in audit.findings if one.outcome is AuditOutcome.PASS and one.code]
    parts = [Part("checks", "", (_checks(audit),))]
    parts += [Part(name, words, (_told(name, rows),)) for name, words, rows in (
        ("failed", "what is wrong", failed), ("remarks", "what is said of the rest", remarks)
    ) if rows]  # fmt: skip
    if audit.times:
        parts.append(Part("times", _apart(audit), (_times(audit),)))
    if audit.work:
        parts.append(Part("work", "what torch sees of a call", (_work(audit),)))
    if audit.layers:
        parts.insert(0, Part("layers", _covered(audit), (_layers(audit),)))
    parts.append(Part("summary", "", (Text(_verdict(audit), _TONES[audit.outcome]),)))
    return Page(title, "", tuple(parts), _LEGEND)


def _checks(audit: Audit) -> Table:
    rows = []
    for check in dict.fromkeys(one.check for one in audit.findings):
        found = [one for one in audit.findings if one.check == check]
        worst = next((one for one in found if one.outcome is AuditOutcome.FAIL), None) or next(
            (one for one in found if one.outcome is AuditOutcome.CANNOT_TELL), found[0]
        )
        codes = ", ".join(dict.fromkeys(one.code for one in found if one.code))
        rows.append((Field(check), Field(worst.outcome.value, tone=_TONES[worst.outcome]), Field(codes or units.NONE)))
    return Table("checks", "", (Column("check"), Column("outcome"), Column("codes")), tuple(rows))


def _apart(audit: Audit) -> str:
    return f"a call on other data: {audit.spread or 0:.0%} apart; the same data twice: {audit.noise or 0:.0%}"


def _times(audit: Audit) -> Table:
    rows = tuple((Field(data), Field(units.seconds(seconds))) for data, seconds in audit.times)
    return Table("times", "", (Column("data"), Column("time of a call", number=True)), rows)


def _work(audit: Audit) -> Table:
    columns = (
        Column("of"), Column("allocations", number=True), Column("bytes", number=True), Column("casts", number=True),
        Column("copies", number=True), Column("products", number=True), Column("time", number=True),
    )  # fmt: skip
    rows = tuple(
        (Field(side), *(Field(units.whole(one)) for one in (work.allocations, work.bytes, work.casts, work.copies,
         work.products)), Field(units.NONE if seconds is None else units.seconds(seconds)))
        for side, work, seconds in audit.work
    )  # fmt: skip
    return Table("work", "", columns, rows)


def _layers(audit: Audit) -> Table:
    columns = (
        Column("layer"), Column("is"), Column("weight"), Column("runs as"), Column("why not converted", below=True)
    )  # fmt: skip
    rows = tuple(
        (Field(one.name), Field(one.what), Field("x".join(map(str, one.weight))),
         Field(one.runs or (units.NONE if one.low else "not converted")), Field(one.reason))
        for one in audit.layers
    )  # fmt: skip
    return Table("layers", "", columns, rows)


def _covered(audit: Audit) -> str:
    """How much was converted, by number and, where the model was run, by FLOPs."""
    low, flops = sum(one.low for one in audit.layers), sum(one.flops for one in audit.layers)
    share = f", {audit.low_flops / flops:.0%} of the FLOPs of their products" if flops else ""
    return f"{low} of {len(audit.layers)} layers converted{share}"


def _told(name: str, findings: list[AuditFinding]) -> Table:
    columns = (
        Column("check"), Column("code"), Column("smallest input"), Column("error", number=True),
        Column("expected", number=True), Column("why", below=True),
    )  # fmt: skip
    rows = tuple(
        (Field(one.check), Field(one.code), Field(one.input or units.NONE), Field(_share(one.error)),
         Field(_share(one.expected)), Field(one.why))
        for one in findings
    )  # fmt: skip
    return Table(name, "", columns, rows)


def _share(error: float | None) -> str:
    return units.NONE if error is None else f"{100 * error:.3g}%"


def _verdict(audit: Audit) -> str:
    looked = f"{units.whole(audit.tried)} results in {units.seconds(audit.seconds)}"
    return f"{audit.outcome.value}: {looked}"


_TAGS = {AuditOutcome.FAIL: "failure", AuditOutcome.CANNOT_TELL: "error"}


def as_json(facts: DeviceFacts, audit: Audit) -> str:
    """The document on one line."""
    return json_line({"device": encode(facts), "outcome": audit.outcome.value, **encode(audit)})


def as_junit(audit: Audit) -> str:
    """A test for each check; what it said of passes stands in their output."""
    root = ET.Element("testsuites", name="fp8bench audit")
    suite = ET.SubElement(root, "testsuite", name=printable(audit.target))
    for check in dict.fromkeys(one.check for one in audit.findings):
        found = [one for one in audit.findings if one.check == check]
        test = ET.SubElement(suite, "testcase", classname=printable(audit.target), name=check, time="0")
        for one in found:
            words = printable(": ".join(filter(None, (one.why, one.input))))
            if one.outcome in _TAGS:
                ET.SubElement(test, _TAGS[one.outcome], message=words, type=one.code)
            elif one.code:
                ET.SubElement(test, "system-out").text = f"{one.code}: {words}"
    for place in (suite, root):
        place.set("tests", str(len(place.findall(".//testcase"))))
        for name, tag in (("failures", "failure"), ("errors", "error")):
            place.set(name, str(len(place.findall(f".//testcase/{tag}"))))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
