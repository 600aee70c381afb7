"""`python -m fp8bench`, and the script of that name."""

import contextlib
import signal
import sys


def run() -> int:
    """The command line; an interrupt while it is being imported, or while the process ends, is one too."""
    code = 130
    with contextlib.suppress(KeyboardInterrupt):
        from fp8bench.cli.main import main

        code = main()
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    return code


if __name__ == "__main__":
    sys.exit(run())
