"""Runs the processes of several ranks as if they were one worker."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fp8bench.errors import WorkerError
from fp8bench.measure.handle import RANK_MODULE, START_SECONDS, ProcessWorker
from fp8bench.measure.process import WorkerProcess
from fp8bench.measure.ranks.answers import MergeFunctionByRequest
from fp8bench.measure.ranks.process import Launch, RanksProcess
from fp8bench.model.raw import Settings

# How long a collective waits for ranks that hang, in seconds. A rank that fails is noticed at once.
WAIT_SECONDS = 30.0


# Environment variables that would send ranks to a different machine, or let them connect late. They are removed.
_REMOVED_ENV_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "TORCH_GLOO_LAZY_INIT")
# Requests for planning a run. If a rank fails before the first case, a single process answers them.
_PLANNING_REQUESTS = ("probe", "software", "overheads")


class RanksWorker(ProcessWorker):
    """Sends each request to several processes (ranks), and merges their answers.

    If a rank fails before the first case, a single process answers the requests for planning. The first case then fails
    with the error of that rank. Later cases get new ranks.
    """

    _rank_start_error: WorkerError | None = None

    def __init__(
        self,
        settings: Settings,
        ranks: int,
        wait_seconds: float | None = None,
        module: str = RANK_MODULE,
        merges: MergeFunctionByRequest = MappingProxyType({}),
    ) -> None:
        super().__init__(settings, module=module)
        wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._launch = Launch(ranks, wait_seconds, START_SECONDS, module, merges)
        self._single_worker = ProcessWorker(settings)

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if self._rank_start_error is None:
            try:
                return super().ask(limit, name, *arguments)
            except WorkerError as error:
                is_failing_rank_unknown = error.rank is None and not error.undecided
                if is_failing_rank_unknown or name not in _PLANNING_REQUESTS:
                    raise
                self.restart()
                self._rank_start_error = error
        if name in _PLANNING_REQUESTS:
            answer = self._single_worker.ask(limit, name, *arguments)
            if name == "probe":  # list each kind of device once, because a rank uses one device
                return tuple(replace(facts, ranks=self._launch.ranks) for facts in answer if facts.index == 0)
            return answer
        start_error, self._rank_start_error = self._rank_start_error, None
        raise start_error

    def close(self) -> None:
        self._single_worker.close()
        super().close()

    def _start_process(self) -> WorkerProcess:
        return RanksProcess(self._python, self._environment(), self._launch)

    def _environment(self) -> dict[str, str]:
        """Returns the environment of the ranks, which restricts communication to this machine's loopback interface, and
        keeps NCCL's debugging port closed.
        """
        inherited_variables = {
            name: text for name, text in super()._environment().items() if name not in _REMOVED_ENV_VARIABLES
        }
        loopback_interface_name = "lo0" if sys.platform == "darwin" else "lo"
        # '=' makes NCCL match the complete name of the interface, not a prefix.
        rank_network_variables = {
            "GLOO_SOCKET_IFNAME": loopback_interface_name,
            "NCCL_SOCKET_IFNAME": f"={loopback_interface_name}",
            "NCCL_RAS_ENABLE": "0",
        }
        # The user's environment may override the first variable, but not those of the network.
        return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **inherited_variables, **rank_network_variables}

    def _exchange_request(self, process: WorkerProcess, limit: float, name: str, *arguments: Any) -> Any:
        try:
            return super()._exchange_request(process, limit, name, *arguments)
        except WorkerError as error:
            if isinstance(process, RanksProcess):
                error.rank, error.undecided = process.failed, process.undecided
            raise
        finally:
            if isinstance(process, RanksProcess) and process.is_broken:
                self.restart()
