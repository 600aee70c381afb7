"""`python -m fp8bench` and the console script."""

import contextlib
import signal
import sys


def run() -> int:
    """Runs the command line; interrupts during imports and shutdown are handled, too."""
    code = 130
    with contextlib.suppress(KeyboardInterrupt):
        from fp8bench.cli.main import main

        code = main()
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    return code


if __name__ == "__main__":
    sys.exit(run())
