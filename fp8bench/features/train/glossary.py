"""Explains the names of the health rules for `fp8bench list rules`."""

from __future__ import annotations

from fp8bench.features.train.health import health  # noqa: F401 - its imports register the rules
from fp8bench.features.train.health.steps import RULES

GLOSSARY_NAME = "rules"


def explain_names() -> dict[str, str]:
    """Returns the explanation of each rule by its name."""
    texts = {}
    for rule in RULES:
        remedies = "; ".join(rule.remedies)
        texts[rule.name] = f"{rule.name}: {rule.rationale()} Alarms at: {rule.alarms_at}. Remedy: {remedies}"
    return texts
