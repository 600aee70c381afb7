"""The interface of a report's sections, and their registry.

A section turns material into elements, and knows no output format. It is one decorated class in one file of
fp8bench/report/sections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from fp8bench.registry import Registry
from fp8bench.report.elements import Part
from fp8bench.report.material import Material


class Section(ABC):
    """`rank` orders sections from the top of the page down."""

    name: ClassVar[str]
    summary: ClassVar[str]
    rank: ClassVar[int]

    @abstractmethod
    def build(self, material: Material) -> Part | None:
        """The section for this material; None where it has nothing to say."""


sections: Registry[Section] = Registry("section", "fp8bench.report.sections", Section, ("name", "summary", "rank"))


def parts_of(material: Material) -> tuple[Part, ...]:
    """All sections that have something to say, in order."""
    ordered = sorted((sections.get(name) for name in sections.names()), key=lambda section: section.rank)
    return tuple(part for part in (section.build(material) for section in ordered) if part is not None)
