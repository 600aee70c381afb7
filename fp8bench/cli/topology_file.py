"""A file that says what joins GPUs: one number a line.

node: 8          # GPUs of a node
memory: 80 GiB   # of each of them
inside: 450      # GB/s that a GPU sends to others of its node, one way
between: 50      # GB/s that it sends to other nodes
bf16: 660        # TFLOP/s that products reach: fp8bench doctor --ceilings measures them
fp8: 980
"""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from fp8bench import units
from fp8bench.cli.yaml_file import Kind, items, place, read_mapping, scalar, shown
from fp8bench.errors import UsageError
from fp8bench.model.parallel import Topology

_FORM = "Expected six lines: node, memory, inside, between, bf16 and fp8, like `node: 8` and `memory: 80 GiB`."
_KIND = Kind("--topology", "description of GPUs", _FORM)
# What a number of each line is multiplied by; node and memory are read otherwise.
_FACTORS = {"inside": 1e9, "between": 1e9, "bf16": 1e12, "fp8": 1e12}
# Less is a number without its unit.
_LEAST_MEMORY = 1 << 30
_NAMES = ("node", "memory", *_FACTORS)


def read_topology(file: Path) -> Topology:
    """Raises UsageError with file and line."""
    found: dict[str, float] = {}
    for name, key, node in items(file, read_mapping(file, _KIND), _KIND):
        if name not in _NAMES:
            raise UsageError(f"{place(file, key)}: unknown key {name!r:.80}. Known: {', '.join(_NAMES)}.")
        found[name] = _value(file, name, node)
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise UsageError(f"{file}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. {_FORM}")
    return Topology(node=int(found.pop("node")), **found)


def _value(file: Path, name: str, node: yaml.Node) -> float:
    text = scalar(file, node).strip() if isinstance(node, yaml.ScalarNode) else ""
    try:
        if name == "memory":
            if (size := float(units.bytes_of(text))) >= _LEAST_MEMORY:
                return size
            raise ValueError(text)
        value = float(text)
        if math.isfinite(value) and value > 0 and (name != "node" or value == int(value) <= 1 << 20):
            return value * _FACTORS.get(name, 1)
    except ValueError:
        pass
    expected = {"node": "a whole number of GPUs from 1 on", "memory": "a size like 80 GiB, 1 GiB or more"}.get(
        name, "a number above 0"
    )
    raise UsageError(f"{place(file, node)}: {name}: expected {expected}, got {shown(node)}.")
