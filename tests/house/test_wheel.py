"""The wheel holds the package and nothing else, and the container builds the same one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fp8bench

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_in(ROOT, tmp_path_factory.mktemp("wheel"))


def built_in(source: Path, folder: Path) -> Path:
    """The wheel, built with the tools of this environment: no network."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_contents(wheel: Path) -> None:
    assert wheel.name == f"fp8bench-{fp8bench.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"fp8bench-{fp8bench.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"fp8bench", info}
    assert f"{info}/licenses/LICENSE" in names
    files = (path for path in (ROOT / "fp8bench").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {name for name in names if name.startswith("fp8bench/")} == {
        path.relative_to(ROOT).as_posix() for path in files
    }
    assert {"fp8bench/report/page/page.html.j2", "fp8bench/analysis/datasheet.toml"} <= names


@pytest.mark.slow
def test_the_container_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    text = (ROOT / "Containerfile").read_text()
    first, second = text.split("\nFROM ")[1:]
    for line in re.findall(r"^COPY (?!--)(.*)$", first, re.MULTILINE):
        *names, target = line.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, tmp_path / target)
    assert "python -m build --wheel" in first and "COPY --from=wheel" in second
    with zipfile.ZipFile(built_in(tmp_path, tmp_path / "dist")) as archive, zipfile.ZipFile(wheel) as other:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }
    (pattern,) = re.findall(r"grep '(\S+)' /wheel/constraints", second)
    assert len(re.findall(pattern, (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    assert 'ENTRYPOINT ["fp8bench"]' in second
    assert re.search(r"^USER [1-9]\d*:", second, re.MULTILINE), "the container would run as root"
