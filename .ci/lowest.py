"""Prints the lowest versions that pyproject.toml declares, as constraints: `pip install -c FILE`."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["asv"]]:
    name, version = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:[,;].*)?", requirement).groups()
    print(f"{name}=={version}")
