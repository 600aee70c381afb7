"""The program that `python -m fp8bench` and the installed command `fp8bench` run."""

import contextlib
import signal
import sys


def run() -> int:
    """Runs the command line and returns its exit code. An interrupt during imports gives exit code 130, without a
    traceback. An interrupt at shutdown is ignored.
    """
    code = 130
    with contextlib.suppress(KeyboardInterrupt):
        from fp8bench.cli.main import main

        code = main()
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on only the interpreter shuts down
    return code


if __name__ == "__main__":
    sys.exit(run())
