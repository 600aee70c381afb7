"""A plan of three cells that take no time, as `suite --dry-run --write-plan` wrote it."""

from pathlib import Path

import pytest

from tests.commands import Say

_CELLS = "gemm --quick --no-energy --rounds 2 --dtypes fp32 --no-isolation --set shape=16,32,48"


@pytest.fixture
def plan(store: Path, fp8bench: Say, tmp_path: Path) -> Path:
    code, out, err = fp8bench("suite", *_CELLS.split(), "--dry-run", "--write-plan", str(tmp_path / "plan.json"))
    assert code == 0 and "groups: 3" in out and "3 cells" in err
    return tmp_path / "plan.json"
