"""Exit codes of errors, and what they carry."""

from __future__ import annotations

import inspect
import pickle

from fp8bench import errors
from fp8bench.errors import Fp8benchError, UnknownName, WorkerError, WorkerFault


def test_exit_codes_are_the_documented_ones() -> None:
    """1 and 4 are reserved for verdicts: regressions and missing baselines."""
    assert (errors.EXIT_OK, errors.EXIT_USAGE, errors.EXIT_FAILED, errors.EXIT_INTERRUPTED) == (0, 2, 3, 130)
    for kind in filter(inspect.isclass, vars(errors).values()):
        if issubclass(kind, Fp8benchError):
            assert kind.exit_code == (3 if issubclass(kind, WorkerError) else 2)


def test_an_unknown_name_gives_the_nearest_and_all_known() -> None:
    error = UnknownName("precision", "BF61", ["fp8", "bf16"])
    assert str(error) == "unknown precision 'BF61'. Did you mean 'bf16'? Known: bf16, fp8."
    assert (error.given, error.known, error.nearest) == ("BF61", ["bf16", "fp8"], "bf16")
    assert str(UnknownName("layer kind", "x", [])) == "unknown layer kind 'x'. Known: none."


def test_a_fault_carries_what_the_worker_said() -> None:
    fault = WorkerFault("MemoryError", "", "Traceback ...", True)
    assert (str(fault), fault.kind, fault.trace, fault.out_of_memory) == (
        "MemoryError",
        "MemoryError",
        "Traceback ...",
        True,
    )
    assert str(WorkerFault("ValueError", "bad")) == "ValueError: bad"
    assert isinstance(pickle.loads(pickle.dumps(errors.StoreError("x"))), errors.StoreError)
