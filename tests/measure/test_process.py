"""What is reported about a worker process that has vanished."""

from __future__ import annotations

import io

from fp8bench.measure.process import describe_exit, last_words
from tests.counts import for_each


@for_each(
    ("log", "words"),
    [
        (b"", ""),
        (b"\n  \n", ""),
        (b"killed", ": killed"),
        (b"Traceback (most recent call last):\n  File x\nValueError: no\n\n", ": ValueError: no"),
        (b"terminate called after throwing\n  what():  no memory\nAborted\n", ": what():  no memory"),
        (b"Fatal Python error: Aborted\nThread 0x1\n  File x\n", ": Fatal Python error: Aborted"),
        (b"x" * 3000 + b"\n\xff cut", ": \ufffd cut"),
    ],
)
def test_the_last_error_of_a_log_is_quoted(log: bytes, words: str) -> None:
    assert last_words(io.BytesIO(log)) == words


def test_exit_statuses_have_words() -> None:
    assert describe_exit(0) == "exited with status 0"
    assert describe_exit(-11) == "was ended by SIGSEGV"
    assert describe_exit(-64) in ("was ended by SIGRTMAX", "was ended by signal 64")
    assert describe_exit(-9).endswith("when memory runs out)")
