"""An audit for programs: JSON, and JUnit with a test a check."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from fp8bench.model import DeviceFacts
from fp8bench.model.audit import Audit, AuditOutcome
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import json_line
from fp8bench.report.elements import printable

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
