"""`python -m fp8bench`, and the script of that name."""

import sys


def run() -> int:
    """The command line; an interrupt while it is being imported is one, too."""
    try:
        from fp8bench.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
