"""Several ranks as one worker."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fp8bench.errors import WorkerError
from fp8bench.measure.handle import RANK_MODULE, START_SECONDS, ProcessWorker
from fp8bench.measure.process import WorkerProcess
from fp8bench.measure.ranks.answers import Merges
from fp8bench.measure.ranks.process import Launch, RanksProcess
from fp8bench.model.raw import Settings

# How long a collective waits for the others. A rank that fails is noticed at once; this is for one that hangs.
WAIT_SECONDS = 30.0


# Variables that lead ranks to a different machine, or let them connect late.
_ELSEWHERE = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "TORCH_GLOO_LAZY_INIT")
# Requests of a plan before its first case; one process can answer them as well.
_BEFORE_CASES = ("probe", "software", "overheads")


class RanksWorker(ProcessWorker):
    """A bench in each of several processes; all are asked the same, and their answers are merged.

    If a rank fails before there is a case, one process answers what a plan needs, and the first case fails by that
    rank. Later cases have fresh ranks.
    """

    _unstarted: WorkerError | None = None

    def __init__(
        self,
        settings: Settings,
        ranks: int,
        wait_seconds: float | None = None,
        module: str = RANK_MODULE,
        merges: Merges = MappingProxyType({}),
    ) -> None:
        super().__init__(settings, module=module)
        wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._launch = Launch(ranks, wait_seconds, START_SECONDS, module, merges)
        self._alone = ProcessWorker(settings)

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if self._unstarted is None:
            try:
                return super().ask(limit, name, *arguments)
            except WorkerError as error:
                nobody = error.rank is None and not error.undecided
                if nobody or name not in _BEFORE_CASES:
                    raise
                self.restart()
                self._unstarted = error
        if name in _BEFORE_CASES:
            answer = self._alone.ask(limit, name, *arguments)
            if name == "probe":  # each rank sees one device of a kind
                return tuple(replace(facts, ranks=self._launch.ranks) for facts in answer if facts.index == 0)
            return answer
        lost, self._unstarted = self._unstarted, None
        raise lost

    def close(self) -> None:
        self._alone.close()
        super().close()

    def _start_process(self) -> WorkerProcess:
        return RanksProcess(self._python, self._environment(), self._launch)

    def _environment(self) -> dict[str, str]:
        """Keeps everything on this machine's loopback interface, whatever was set, and NCCL's debugging port closed."""
        inherited = {name: text for name, text in super()._environment().items() if name not in _ELSEWHERE}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}", "NCCL_RAS_ENABLE": "0"}
        return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **inherited, **interfaces}

    def _exchange(self, process: WorkerProcess, limit: float, name: str, *arguments: Any) -> Any:
        try:
            return super()._exchange(process, limit, name, *arguments)
        except WorkerError as error:
            if isinstance(process, RanksProcess):
                error.rank, error.undecided = process.failed, process.undecided
            raise
        finally:
            if isinstance(process, RanksProcess) and process.broken:
                self.restart()
