"""`python -m fp8bench`."""

import sys

from fp8bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
