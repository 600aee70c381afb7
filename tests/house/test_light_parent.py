"""Commands that do not measure start without heavy packages. Checked by module name, not by time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.house.sources import ROOT

HEAVY = {"torch", "numpy", "pandas", "matplotlib"}


def test_the_command_line_starts_without_heavy_packages() -> None:
    """In one process, since commands would import the same modules again in separate ones."""
    script = (
        "import sys, fp8bench.cli.main as cli\n"
        "def code_of(words):\n"
        "    try: return cli.main(words)\n"
        "    except SystemExit as end: return end.code\n"
        "rooms = {'model', 'report', 'registry', 'analysis', 'store'}\n"
        "codes = [code_of(['--help'])]\n"
        "early = rooms & {name.split('.')[1] for name in sys.modules if name.startswith('fp8bench.')}\n"
        "codes += map(code_of, (['--version'], ['nosuch'], ['suite', 'nosuch'], ['list'], []))\n"
        f"print(codes[:5], early, {HEAVY!r} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("usage: fp8bench")
    assert done.stderr.splitlines()[-1] == "[0, 0, 2, 2, 0] set() set()" and "Traceback" not in done.stderr


def test_a_whole_run_leaves_the_parent_without_torch(tmp_path: Path) -> None:
    """Worker answers must not import torch in the parent: torch.__version__, for example, is a class of torch."""
    script = (
        "import sys; from pathlib import Path; from fp8bench.model import Request\n"
        "from fp8bench.pipeline import execute\n"
        "from fp8bench.analysis.findings import findings; from fp8bench.protocols import SilentObserver\n"
        "axes = (('shape', ('64',)),)\n"
        "run = execute(Request('gemm', ('fp32', 'fp8'), axes=axes, rounds=2), Path('store'), SilentObserver(), '')\n"
        "findings(run)\n"
        "print(run.ok, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


def test_help_imports_the_command_that_is_named_and_no_other() -> None:
    script = (
        "import sys\nfrom fp8bench.cli.main import COMMANDS, build_parser\n"
        "def loaded(): return [name for name in sys.modules if '.cli.commands.' in name or name.endswith('.command')]\n"
        "build_parser(())\n"
        "assert not loaded()\n"
        "for place, name in enumerate(COMMANDS):\n"
        "    build_parser((name,)).format_help()\n"
        "    assert len(loaded()) == place + 1, name\n"
        f"print({HEAVY!r} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
