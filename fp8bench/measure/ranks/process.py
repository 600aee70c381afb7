"""The launcher of several ranks and the sockets to them, with the interface of one worker's process."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8bench.errors import RanksDisagree, WorkerLost
from fp8bench.measure.process import WorkerProcess, describe_exit, last_words, plain_value
from fp8bench.measure.ranks.answers import (
    Merges,
    RankState,
    behind,
    culprit,
    delay_in_words,
    failed_rank,
    failure_in_words,
    merge_answers,
    suspects,
)
from fp8bench.model.ranks import PARENT, FailedRank, beat_file, heartbeat_of, words_file

LAUNCHER_MODULE = "fp8bench.worker.ranks.launcher"
_GLANCE_SECONDS = 0.2
# Once a rank has failed the others fail soon, or wait for it in vain; a busy machine may stop one for seconds, and a
# fault of all ranks must not be attributed to the first one that reports it.
_GRACE_SECONDS = 5.0
# Ranks and what they have started are ended at once; a loaded machine takes its time.
_ENDING_SECONDS = 10.0
# The launcher looks every 0.1 s, and then ends the others.
_LAUNCHER_SECONDS = 2.5
# Ranks that ended are named by the launcher as soon as it gets a core.
_TELLING_SECONDS = 30.0
_ENDED_OF_ITSELF = "ended without an error, before it had answered"
_NOBODY_KNOWS = "ended, and the launcher of the ranks did not say how"
# Characters of the folder for temporary files: the name of a socket in our folder there may have 103 (Linux: 107).
_MOST_LETTERS = 70
Reply = tuple[int, tuple[Any, ...]]


class Launch(NamedTuple):
    """How ranks are started. `wait_seconds` is how long their collectives wait, `start_seconds` how long all may take
    to start, `module` what each runs, `merges` how answers to requests of that module are merged."""

    ranks: int
    wait_seconds: float
    start_seconds: float
    module: str
    merges: Merges = MappingProxyType({})


@dataclass
class _Rank:
    number: int
    pid: int = 0
    requests: Connection | None = None
    lifeline: Connection | None = None
    reply: Reply | None = None
    ended_at: float | None = None

    def close(self) -> None:
        for connection in (self.lifeline, self.requests):
            if connection is not None:
                connection.close()


class RanksProcess(WorkerProcess):
    """Sends each request to all ranks; the answer is there when all have answered.

    `broken`: they are no longer in step with each other, so no more requests can be sent.
    """

    def __init__(self, python: str, environment: Mapping[str, str], launch: Launch) -> None:
        self._launch = launch
        crowded = len(os.fsencode(tempfile.gettempdir())) > _MOST_LETTERS
        self._folder = Path(tempfile.mkdtemp(prefix="fp8bench-ranks-", dir="/tmp" if crowded else None))
        self._ranks = [_Rank(number) for number in range(launch.ranks)]
        self._request = "start"
        self._begun = time.monotonic()
        self.broken = False
        self.failed: FailedRank | None = None
        self.undecided = False
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(self._folder / PARENT))
                listening.listen(2 * launch.ranks)
                super().__init__(python, LAUNCHER_MODULE, environment)
                super().send((launch.ranks, launch.module, str(self._folder), launch.wait_seconds))
                self._meet(listening)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._ranks[0].pid

    def send(self, request: object) -> None:
        self._request = str(request[1]) if isinstance(request, tuple) else ""
        written = pickle.dumps(request)
        for rank in self._ranks:
            rank.reply = None
            assert rank.requests is not None
            with contextlib.suppress(OSError):  # one that has ended is noticed where its answer is waited for
                rank.requests.send_bytes(written)

    def wait_for_answer(self, limit: float) -> bool:
        """Whether all have answered within `limit` seconds, or some have and the others no longer can. Raises EOFError
        if a rank or the launcher has ended."""
        end = time.monotonic() + limit
        while any(rank.reply is None for rank in self._ranks):
            self._receive_replies(min(_GLANCE_SECONDS, max(0.0, end - time.monotonic())))
            if self._has_failed:
                self._wait_for_others()
                if self._has_ended or self._popen.poll() is not None:
                    raise EOFError
                return True
            if self._popen.poll() is not None:
                self._wait_for_others()
                raise EOFError
            if time.monotonic() >= end:
                return not any(rank.reply is None for rank in self._ranks)
        return True

    def receive(self) -> Any:
        replies = [rank.reply for rank in self._ranks if rank.reply is not None]
        faults = [reply for _, reply in replies if reply[0] == "fault"]
        number = replies[0][0]
        # 1. All have answered the same request: merge, unless they contradict each other.
        if not faults and {place for place, _ in replies} == {number}:
            try:
                return number, (
                    "ok",
                    merge_answers(self._request, [reply[1] for _, reply in replies], self._launch.merges),
                )
            except RanksDisagree as error:
                return number, ("fault", "the ranks disagree", str(error), "", False)
        # 2. The same fault everywhere leaves no rank stuck, and the worker goes on.
        if len(faults) == len(self._ranks) and len({fault[1] for fault in faults}) == 1:
            kind, text, trace, _ = faults[0][1:]
            return number, (
                "fault",
                kind,
                f"{text} (on all {len(faults)} ranks)",
                trace,
                all(fault[4] for fault in faults),
            )
        # 3. Some failed: the others may wait for them for good, so the group is not asked again.
        self.broken = True
        states = self._blame()
        words = failure_in_words(states, time.monotonic())
        return number, ("fault", words, "", culprit(states).fault[1], False)

    def delay_in_words(self) -> str:
        return delay_in_words(self._blame(), time.monotonic())

    @property
    def was_killed(self) -> bool:
        return "SIGKILL" in culprit(self._states()).ended

    def end_in_words(self) -> str:
        states = self._blame()
        status = self._popen.poll()
        if status is not None and (status != 0 or not self._has_ended):
            last = behind(states)  # the launcher's end brought theirs, in random order, which shows nothing
            self.failed = failed_rank(last.beat, len(states), time.monotonic())
            where = f"with rank {last.rank} in {last.beat.doing}{last_words(self._log)}"
            return f"the launcher of the ranks {describe_exit(status)}, {where}"
        return failure_in_words(states, time.monotonic())

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Lets go of the ranks and of the launcher, whose warden ends all that they have started and removes the
        folder.

        The launcher is given time to see its ranks end: then it leaves no process behind.
        """
        self._end_ranks()
        if hasattr(self, "_popen"):
            attended = self._is_attended()
            self._close_lifeline()
            end = time.monotonic() + _ENDING_SECONDS
            while attended and self._folder.exists() and time.monotonic() < end:
                time.sleep(0.005)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_LAUNCHER_SECONDS)
            super().kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_attended(self) -> bool:
        if self._lifeline < 0:
            return False
        looking = select.poll()
        looking.register(self._lifeline, 0)
        return not looking.poll(0)  # POLLERR is reported without being asked for

    @property
    def _has_failed(self) -> bool:
        return self._has_ended or any(rank.reply is not None and rank.reply[1][0] == "fault" for rank in self._ranks)

    @property
    def _has_ended(self) -> bool:
        return any(rank.ended_at is not None for rank in self._ranks)

    def _receive_replies(self, seconds: float) -> None:
        waiting = {
            rank.requests: rank
            for rank in self._ranks
            if rank.requests is not None and rank.reply is None and rank.ended_at is None
        }
        for connection in wait(list(waiting), seconds) if waiting else ():
            rank = waiting[connection]  # type: ignore[index]
            try:
                rank.reply = plain_value(rank.requests.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                rank.ended_at = time.monotonic()

    def _wait_for_others(self) -> None:
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end and any(rank.reply is None and rank.ended_at is None for rank in self._ranks):
            self._receive_replies(0.05)

    def _blame(self) -> list[RankState]:
        """Returns the states of all ranks; records which failed, because they are about to be ended."""
        states = self._states()
        named = suspects(states)
        self.undecided = len(named) > 1
        self.failed = None if self.undecided else failed_rank(named[0].beat, len(states), time.monotonic())
        return states

    def _states(self) -> list[RankState]:
        statuses = self._statuses()
        in_order = sorted(self._ranks, key=lambda rank: (rank.ended_at is None, rank.ended_at or 0.0, rank.number))
        return [self._state(rank, statuses) for rank in in_order]

    def _state(self, rank: _Rank, statuses: Mapping[int, int] | None) -> RankState:
        beat = heartbeat_of(rank.number, self._read(beat_file(rank.number)))
        if not beat.sequence:
            beat = replace(beat, seconds=self._begun)
        reply = rank.reply[1] if rank.reply is not None else ()
        fault = (": ".join(filter(None, reply[1:3])), reply[3]) if reply and reply[0] == "fault" else ("", "")
        status, ended = (statuses or {}).get(rank.number), ""
        if rank.ended_at is not None:
            ended = _NOBODY_KNOWS if statuses is None else describe_exit(status) if status else _ENDED_OF_ITSELF
            ended += self._last_words_of(rank)
        return RankState(beat, rank.reply is not None, fault, ended, status)

    def _last_words_of(self, rank: _Rank) -> str:
        try:
            with (self._folder / words_file(rank.number)).open("rb") as words:
                return last_words(words)
        except FileNotFoundError:  # it ended before it had a file: its output is where its launcher prints
            return last_words(self._log)
        except OSError:
            return ""

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return b""

    def _statuses(self) -> Mapping[int, int] | None:
        """The exit statuses of ranks that failed, once one has ended; None where the launcher reports none.

        It does not notice a rank that ended well while others go on. So the others are ended first: then it reports in
        any case, and a rank that it does not name has ended well.
        """
        if not self._has_ended:
            return None
        if not hasattr(self, "_exit_statuses"):
            self._end_ranks()
        return self._read_statuses()

    def _read_statuses(self) -> Mapping[int, int] | None:
        if not hasattr(self, "_exit_statuses"):
            self._exit_statuses: Mapping[int, int] | None = None
            with contextlib.suppress(EOFError, OSError):
                if self._connection.poll(_TELLING_SECONDS):
                    self._exit_statuses = plain_value(self._connection.recv_bytes())
        return self._exit_statuses

    def _meet(self, listening: socket.socket) -> None:
        begun = time.monotonic()
        end = begun + self._launch.start_seconds
        while missing := [rank for rank in self._ranks if rank.requests is None or rank.lifeline is None]:
            connections: list[Any] = [rank.requests for rank in self._ranks if rank.requests is not None]
            ready, _, _ = select.select([listening, *connections], [], [], _GLANCE_SECONDS)
            if listening in ready:
                # A connection begins with its rank's number, because ranks connect in any order.
                connection = Connection(listening.accept()[0].detach())
                with contextlib.suppress(EOFError, ConnectionError):  # a rank that has ended is noticed below
                    number, pid, channel = plain_value(connection.recv_bytes())
                    self._ranks[number].pid = pid
                    setattr(self._ranks[number], channel, connection)
            elif ready or self._popen.poll() is not None:  # ranks send nothing before a request
                raise self._failed_start()
            elif time.monotonic() > end:
                # Only one missing rank can be blamed; of several each may have waited for another.
                numbers = {rank.number for rank in missing}
                named = [state for state in self._states() if state.rank in numbers]
                self.undecided = len(named) > 1
                if not self.undecided:
                    self.failed = failed_rank(named[0].beat, len(self._ranks), time.monotonic())
                waited = f"did not start within {time.monotonic() - begun:.0f} s"
                raise self._lost(" and ".join(f"rank {state.rank} {waited}" for state in named))

    def _failed_start(self) -> WorkerLost:
        """Called when a rank or the launcher has ended, perhaps before that rank had connected."""
        self._receive_replies(0.0)
        for number in self._read_statuses() or ():
            self._ranks[number].ended_at = self._ranks[number].ended_at or time.monotonic()
        return self._lost(self.end_in_words())

    def _lost(self, reason: str) -> WorkerLost:
        lost = WorkerLost(f"the ranks could not be started: {reason}", self.was_killed)
        lost.rank, lost.undecided = self.failed, self.undecided
        return lost

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.close()
