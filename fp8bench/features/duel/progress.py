"""What whoever started a duel sees while it is measured."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TextIO

from fp8bench.cli.live import LiveLine, time_left
from fp8bench.cli.outputs import show_view
from fp8bench.cli.progress import TerminalJob
from fp8bench.features.duel.kind import DuelKind
from fp8bench.features.duel.observer import DuelJobObserver, DuelObserver
from fp8bench.features.duel.values import Duel
from fp8bench.model import Case
from fp8bench.protocols import SilentObserver


class DuelProgress(LiveLine, SilentObserver):
    """An observer that is told of every session of a case too."""

    def __init__(self, stream: TextIO | None, environ: Mapping[str, str]) -> None:
        super().__init__(stream, environ)
        self._begun = time.monotonic()
        self._words = ""

    def starts(self) -> None:
        """Workers are started, which takes a while."""
        self.show(f"{self._words}, starting workers" if self._words else "starting workers")

    def in_session(self, session: int, sessions: int, place: int, cases: int) -> None:
        """A case is measured, counted from 0."""
        left = time_left(time.monotonic() - self._begun, (session * cases + place) / (sessions * cases))
        self._words = f"session {session + 1}/{sessions}, case {place + 1}/{cases}{left}"
        self.show(self._words)

    def working(self, case: Case, doing: str, share: float) -> None:
        self.show(f"{self._words}, {doing} {case.id}")


class DuelTerminal(TerminalJob):
    """An observer of jobs with duels that tells whoever started the command."""

    @contextmanager
    def duelling(self) -> Iterator[DuelObserver]:
        with closing(DuelProgress(sys.stderr, os.environ)) as observer:
            yield observer

    def cut_off(self, duel: Duel) -> None:
        show_view(DuelKind().view(duel), Namespace())


TERMINAL: DuelJobObserver = DuelTerminal()
