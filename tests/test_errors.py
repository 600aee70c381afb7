"""The hierarchy of errors, its exit codes, and the tree drawn in the docstring."""

from __future__ import annotations

import inspect
import pickle
import re

from fp8bench import errors
from fp8bench.errors import Fp8benchError, UnknownName, WorkerFault
from tests.counts import for_each

LINE = re.compile(r"^(?P<lead>[ |`-]*)(?P<name>[A-Z]\w+) +(?P<code>\d+)(?:   |$)")
CLASSES = {
    name: found for name, found in vars(errors).items() if inspect.isclass(found) and issubclass(found, Fp8benchError)
}


def drawn() -> dict[str, tuple[str | None, int]]:
    """The docstring's tree: a class to its parent and exit code."""
    tree: dict[str, tuple[str | None, int]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = LINE.match(line)
        if found:
            depth = len(found["lead"])
            parent = above[max(outer for outer in above if outer < depth)] if tree else None
            tree[found["name"]] = (parent, int(found["code"]))
            above = {outer: name for outer, name in above.items() if outer < depth} | {depth: found["name"]}
    return tree


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    """Parents and exit codes, none missing and none too many."""
    real = {
        name: (None if found is Fp8benchError else found.__bases__[0].__name__, found.exit_code)
        for name, found in CLASSES.items()
    }
    assert drawn() == real


def test_exit_codes_are_the_documented_ones() -> None:
    """1 and 4 are kept for regressions and baselines."""
    assert (errors.EXIT_OK, errors.EXIT_USAGE, errors.EXIT_FAILED, errors.EXIT_INTERRUPTED) == (0, 2, 3, 130)
    assert {found.exit_code for found in CLASSES.values()} == {2, 3}


@for_each("name", CLASSES)
def test_every_error_says_in_a_sentence_what_it_means(name: str) -> None:
    """The docstring is the definition."""
    assert (CLASSES[name].__doc__ or "").strip().partition("\n")[0].endswith(".")


def test_an_unknown_name_gives_the_nearest_and_all_known() -> None:
    """Case does not matter for nearness."""
    error = UnknownName("dtype", "BF61", ["fp8", "bf16"])
    assert str(error) == "unknown dtype 'BF61'. Did you mean 'bf16'? Known: bf16, fp8."
    assert (error.given, error.known, error.nearest) == ("BF61", ["bf16", "fp8"], "bf16")


def test_an_unknown_name_where_nothing_is_known() -> None:
    """A suite without layer kinds, for one."""
    assert str(UnknownName("layer kind", "x", [])) == "unknown layer kind 'x'. Known: none."


def test_a_fault_carries_what_the_worker_said() -> None:
    """The text is for a person, the trace for the record."""
    fault = WorkerFault("MemoryError", "", "Traceback ...", True)
    assert (str(fault), fault.kind, fault.trace, fault.out_of_memory) == (
        "MemoryError", "MemoryError", "Traceback ...", True,
    )  # fmt: skip
    assert str(WorkerFault("ValueError", "bad")) == "ValueError: bad"
    assert isinstance(pickle.loads(pickle.dumps(errors.StoreError("x"))), errors.StoreError)
