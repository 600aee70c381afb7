"""Starts the launcher of several ranks and connects to the ranks. It has the interface of a single worker's process."""

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
from fp8bench.measure.process import WorkerProcess, describe_exit, describe_last_line, unpickle_answer
from fp8bench.measure.ranks.answers import (
    MergeFunctionByRequest,
    RankState,
    describe_delay,
    describe_failure,
    find_culprit,
    find_rank_furthest_behind,
    find_suspect_ranks,
    make_failed_rank,
    merge_answers,
)
from fp8bench.model.ranks import PARENT_SOCKET, FailedRank, heartbeat_file, parse_heartbeat, stderr_file

LAUNCHER_MODULE = "fp8bench.worker.ranks.launcher"
_POLL_SECONDS = 0.2
# How long to wait for the other ranks after one has failed. The others fail soon, or wait in vain. A busy machine may
# stop a rank for seconds. A fault of all ranks must not be blamed on the rank that reports it first.
_OTHER_RANKS_SECONDS = 5.0
# Seconds to wait until the processes of all ranks have ended. On a loaded machine this takes long.
_EXIT_SECONDS = 10.0
# Seconds to wait for the launcher's exit. It checks its ranks every 0.1 s, and ends all ranks once one of them has
# ended.
_LAUNCHER_EXIT_SECONDS = 2.5
# Seconds to wait for the launcher's report about ended ranks. On a loaded machine, the launcher must wait for a core.
_LAUNCHER_REPORT_SECONDS = 30.0
_ENDED_NORMALLY_TEXT = "ended without an error, before it had answered"
_ENDED_WITHOUT_REPORT = "ended, and the launcher of the ranks did not report how"
# The longest path of a temporary folder in which sockets are made. The complete path of a socket may have 103
# characters (Linux: 107).
_MAX_PATH_LENGTH = 70
RankReply = tuple[int, tuple[Any, ...]]


class Launch(NamedTuple):
    """Defines how ranks are started.

    `wait_seconds` is how long a collective waits, and `start_seconds` how long the start of all ranks may take. Each
    rank runs `module`. `merge_functions` defines how answers to the requests of that module are merged.
    """

    ranks: int
    wait_seconds: float
    start_seconds: float
    module: str
    merge_functions: MergeFunctionByRequest = MappingProxyType({})


@dataclass
class _RankConnections:
    number: int
    pid: int = 0
    requests: Connection | None = None
    lifeline: Connection | None = None
    reply: RankReply | None = None
    ended_at: float | None = None

    def close(self) -> None:
        for connection in (self.lifeline, self.requests):
            if connection is not None:
                connection.close()


class RanksProcess(WorkerProcess):
    """Sends each request to all ranks. The answer is complete when all ranks have answered.

    `is_broken` is true if the ranks no longer execute the same request, so that they can get no more requests.
    """

    def __init__(self, python: str, environment: Mapping[str, str], launch: Launch) -> None:
        self._launch = launch
        is_temp_path_too_long = len(os.fsencode(tempfile.gettempdir())) > _MAX_PATH_LENGTH
        self._folder = Path(tempfile.mkdtemp(prefix="fp8bench-ranks-", dir="/tmp" if is_temp_path_too_long else None))
        self._ranks = [_RankConnections(number) for number in range(launch.ranks)]
        self._request = "start"
        self._started_at = time.monotonic()
        self.is_broken = False
        self.failed: FailedRank | None = None
        self.undecided = False
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(self._folder / PARENT_SOCKET))
                listening.listen(2 * launch.ranks)  # each rank connects twice: for requests, and as a lifeline
                super().__init__(python, LAUNCHER_MODULE, environment)
                super().send_request((launch.ranks, launch.module, str(self._folder), launch.wait_seconds))
                self._connect_ranks(listening)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._ranks[0].pid

    def send_request(self, request: object) -> None:
        self._request = str(request[1]) if isinstance(request, tuple) else ""
        pickled_request = pickle.dumps(request)
        for rank in self._ranks:
            rank.reply = None
            assert rank.requests is not None
            with contextlib.suppress(OSError):  # if the rank has ended, receiving its answer raises EOFError
                rank.requests.send_bytes(pickled_request)

    def wait_for_answer(self, limit: float) -> bool:
        """Returns whether all ranks answered within `limit` seconds. Also returns True if a rank answered with an
        error, because the others may then wait for it forever.

        Raises EOFError if a rank or the launcher has ended.
        """
        deadline = time.monotonic() + limit
        while any(rank.reply is None for rank in self._ranks):
            self._receive_replies(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            if self._has_failed_rank:
                self._wait_for_other_ranks()
                if self._has_ended_rank or self._popen.poll() is not None:
                    raise EOFError
                return True
            if self._popen.poll() is not None:
                self._wait_for_other_ranks()
                raise EOFError
            if time.monotonic() >= deadline:
                return not any(rank.reply is None for rank in self._ranks)
        return True

    def receive_answer(self) -> Any:
        replies = [rank.reply for rank in self._ranks if rank.reply is not None]
        fault_replies = [reply for _, reply in replies if reply[0] == "fault"]
        number = replies[0][0]
        # 1. If all ranks have answered this request, merge their answers.
        if not fault_replies and {reply_number for reply_number, _ in replies} == {number}:
            try:
                return number, (
                    "ok",
                    merge_answers(self._request, [reply[1] for _, reply in replies], self._launch.merge_functions),
                )
            except RanksDisagree as error:
                return number, ("fault", "the ranks disagree", str(error), "", False)
        # 2. If all ranks have the same fault, none of them waits for another one. So the worker can go on.
        if len(fault_replies) == len(self._ranks) and len({fault[1] for fault in fault_replies}) == 1:
            kind, text, trace, _ = fault_replies[0][1:]
            return number, (
                "fault",
                kind,
                f"{text} (on all {len(fault_replies)} ranks)",
                trace,
                all(fault[4] for fault in fault_replies),
            )
        # 3. If only some ranks failed, the other ranks may wait for them forever. So no rank gets more requests.
        self.is_broken = True
        rank_states = self._store_failed_rank()
        description = describe_failure(rank_states, time.monotonic())
        return number, ("fault", description, "", find_culprit(rank_states).fault[1], False)

    def describe_delay(self) -> str:
        return describe_delay(self._store_failed_rank(), time.monotonic())

    @property
    def was_killed(self) -> bool:
        return "SIGKILL" in find_culprit(self._collect_rank_states()).ended

    def describe_end(self) -> str:
        rank_states = self._store_failed_rank()
        status = self._popen.poll()
        if status is not None and (status != 0 or not self._has_ended_rank):
            # The launcher ended, which ended all ranks in an arbitrary order.
            lagging_rank = find_rank_furthest_behind(rank_states)
            self.failed = make_failed_rank(lagging_rank.heartbeat, len(rank_states), time.monotonic())
            rank_location_text = (
                f"with rank {lagging_rank.rank} in {lagging_rank.heartbeat.doing}{describe_last_line(self._log)}"
            )
            return f"the launcher of the ranks {describe_exit(status)}, {rank_location_text}"
        return describe_failure(rank_states, time.monotonic())

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends the ranks and the launcher. The launcher's warden (a separate process) ends all processes that they
        started, and removes the folder.

        The launcher gets time to notice that its ranks have ended, so that it leaves no process running.
        """
        self._close_ranks()
        if hasattr(self, "_popen"):
            is_launcher_alive = self._is_launcher_alive()
            self._close_lifeline_descriptor()
            deadline = time.monotonic() + _EXIT_SECONDS
            # The warden removes the folder after it has ended all processes.
            while is_launcher_alive and self._folder.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_LAUNCHER_EXIT_SECONDS)
            super().kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_launcher_alive(self) -> bool:
        if self._lifeline < 0:
            return False
        launcher_poller = select.poll()
        launcher_poller.register(self._lifeline, 0)
        return not launcher_poller.poll(0)  # POLLERR, which is reported without a request, means that it has ended

    @property
    def _has_failed_rank(self) -> bool:
        return self._has_ended_rank or any(
            rank.reply is not None and rank.reply[1][0] == "fault" for rank in self._ranks
        )

    @property
    def _has_ended_rank(self) -> bool:
        return any(rank.ended_at is not None for rank in self._ranks)

    def _receive_replies(self, seconds: float) -> None:
        waiting_rank_by_connection = {
            rank.requests: rank
            for rank in self._ranks
            if rank.requests is not None and rank.reply is None and rank.ended_at is None
        }
        for connection in wait(list(waiting_rank_by_connection), seconds) if waiting_rank_by_connection else ():
            rank = waiting_rank_by_connection[connection]  # type: ignore[index]
            try:
                rank.reply = unpickle_answer(rank.requests.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                rank.ended_at = time.monotonic()

    def _wait_for_other_ranks(self) -> None:
        deadline = time.monotonic() + _OTHER_RANKS_SECONDS
        while time.monotonic() < deadline and any(rank.reply is None and rank.ended_at is None for rank in self._ranks):
            self._receive_replies(0.05)

    def _store_failed_rank(self) -> list[RankState]:
        """Returns the states of all ranks, and stores which rank failed. The caller ends all ranks right afterwards."""
        rank_states = self._collect_rank_states()
        suspected_ranks = find_suspect_ranks(rank_states)
        self.undecided = len(suspected_ranks) > 1
        self.failed = (
            None
            if self.undecided
            else make_failed_rank(suspected_ranks[0].heartbeat, len(rank_states), time.monotonic())
        )
        return rank_states

    def _collect_rank_states(self) -> list[RankState]:
        exit_statuses = self._find_statuses()
        # In this order `find_culprit` blames the rank that ended first.
        ranks_in_end_order = sorted(
            self._ranks, key=lambda rank: (rank.ended_at is None, rank.ended_at or 0.0, rank.number)
        )
        return [self._make_rank_state(rank, exit_statuses) for rank in ranks_in_end_order]

    def _make_rank_state(self, rank: _RankConnections, statuses: Mapping[int, int] | None) -> RankState:
        heartbeat = parse_heartbeat(rank.number, self._read_rank_file(heartbeat_file(rank.number)))
        if not heartbeat.sequence:  # a rank without a heartbeat is silent since the start
            heartbeat = replace(heartbeat, seconds=self._started_at)
        rank_reply = rank.reply[1] if rank.reply is not None else ()
        rank_fault = (
            (": ".join(filter(None, rank_reply[1:3])), rank_reply[3])
            if rank_reply and rank_reply[0] == "fault"
            else ("", "")
        )
        status, ended = (statuses or {}).get(rank.number), ""
        if rank.ended_at is not None:
            ended = (
                _ENDED_WITHOUT_REPORT if statuses is None else describe_exit(status) if status else _ENDED_NORMALLY_TEXT
            )
            ended += self._describe_last_line(rank)
        return RankState(heartbeat, rank.reply is not None, rank_fault, ended, status)

    def _describe_last_line(self, rank: _RankConnections) -> str:
        try:
            with (self._folder / stderr_file(rank.number)).open("rb") as words:
                return describe_last_line(words)
        except FileNotFoundError:  # the rank ended before it had a log, so its output is in the launcher's log
            return describe_last_line(self._log)
        except OSError:
            return ""

    def _read_rank_file(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return b""

    def _find_statuses(self) -> Mapping[int, int] | None:
        """Returns the exit status of each failed rank, or None if no rank has ended or the launcher sent no report.

        If a rank exits with status 0 while others run, the launcher reports nothing. So all ranks are ended first,
        after which it always reports. A rank that is missing in its report exited with 0.
        """
        if not self._has_ended_rank:
            return None
        if not hasattr(self, "_exit_statuses"):
            self._close_ranks()
        return self._read_statuses()

    def _read_statuses(self) -> Mapping[int, int] | None:
        if not hasattr(self, "_exit_statuses"):
            # The launcher sends its report only once, so keep it.
            self._exit_statuses: Mapping[int, int] | None = None
            with contextlib.suppress(EOFError, OSError):
                if self._connection.poll(_LAUNCHER_REPORT_SECONDS):
                    self._exit_statuses = unpickle_answer(self._connection.recv_bytes())
        return self._exit_statuses

    def _connect_ranks(self, listening: socket.socket) -> None:
        started_at = time.monotonic()
        deadline = started_at + self._launch.start_seconds
        while missing_ranks := [rank for rank in self._ranks if rank.requests is None or rank.lifeline is None]:
            connections: list[Any] = [rank.requests for rank in self._ranks if rank.requests is not None]
            ready, _, _ = select.select([listening, *connections], [], [], _POLL_SECONDS)
            if listening in ready:
                # Ranks connect in any order, so each connection begins with the number of its rank.
                connection = Connection(listening.accept()[0].detach())
                with contextlib.suppress(EOFError, ConnectionError):  # if the rank has ended, the launcher ends as well
                    number, pid, channel = unpickle_answer(connection.recv_bytes())
                    self._ranks[number].pid = pid
                    setattr(self._ranks[number], channel, connection)
            # before a request, a connection becomes readable only if its rank has ended
            elif ready or self._popen.poll() is not None:
                raise self._make_start_error()
            elif time.monotonic() > deadline:
                # If one rank is missing, it is to blame. Several missing ranks may have waited for each other.
                numbers = {rank.number for rank in missing_ranks}
                missing_rank_states = [state for state in self._collect_rank_states() if state.rank in numbers]
                self.undecided = len(missing_rank_states) > 1
                if not self.undecided:
                    self.failed = make_failed_rank(missing_rank_states[0].heartbeat, len(self._ranks), time.monotonic())
                delay_text = f"did not start within {time.monotonic() - started_at:.0f} s"
                raise self._make_worker_lost_error(
                    " and ".join(f"rank {state.rank} {delay_text}" for state in missing_rank_states)
                )

    def _make_start_error(self) -> WorkerLost:
        """Returns the error for a rank or launcher that ended while ranks were starting, perhaps before it connected to
        this process.
        """
        self._receive_replies(0.0)  # notes which ranks have closed their connections
        for number in self._read_statuses() or ():
            self._ranks[number].ended_at = self._ranks[number].ended_at or time.monotonic()
        return self._make_worker_lost_error(self.describe_end())

    def _make_worker_lost_error(self, reason: str) -> WorkerLost:
        worker_lost_error = WorkerLost(f"the ranks could not be started: {reason}", self.was_killed)
        worker_lost_error.rank, worker_lost_error.undecided = self.failed, self.undecided
        return worker_lost_error

    def _close_ranks(self) -> None:
        for rank in self._ranks:
            rank.close()
