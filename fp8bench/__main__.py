"""The entry point of `python -m fp8bench` and of the installed command `fp8bench`."""

import contextlib
import signal
import sys


def run() -> int:
    """Runs the command line and returns its exit code. An interrupt during imports gives exit code 130, without a
    traceback. An interrupt at shutdown is ignored.
    """
    exit_code = 130
    with contextlib.suppress(KeyboardInterrupt):
        from fp8bench.cli.main import main

        exit_code = main()
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the shutdown of the interpreter follows
    return exit_code


if __name__ == "__main__":
    sys.exit(run())
