"""The wheel holds the package and nothing else, and the container builds the same one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fp8bench
from tests.commands import git
from tests.house.sources import ROOT


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def build(source: Path, folder: Path, *options: str) -> None:
    """Builds with the tools of this environment, without network."""
    done = subprocess.run(
        [sys.executable, "-m", "build", *options, "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_contents_of_the_wheel(wheel: Path) -> None:
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
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout, to know which files are the repository's")
def test_the_source_archive_holds_the_repository(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = git(ROOT, "-c", "safe.directory=*", "ls-files", "-z").split("\0")
    assert {name for name in tracked if name and (ROOT / name).exists()} <= names


def test_what_is_declared_as_lowest_is_a_version_each() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "lowest.py"], capture_output=True, text=True, check=True)
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for line in dependencies:
        requirement = Requirement(line)
        (pin,) = re.findall(rf"^{re.escape(requirement.name)}==(\S+)$", done.stdout, re.MULTILINE)
        assert requirement.specifier.contains(pin) and f">={pin}" in line


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
    build(tmp_path, tmp_path / "dist", "--wheel")
    (built,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive, zipfile.ZipFile(wheel) as other:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }
    (pattern,) = re.findall(r"grep '(\S+)' /wheel/constraints", second)
    assert len(re.findall(pattern, (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    assert 'ENTRYPOINT ["fp8bench"]' in second
    assert re.search(r"^USER [1-9]\d*:", second, re.MULTILINE), "the container would run as root"
