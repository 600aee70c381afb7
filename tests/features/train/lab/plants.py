"""Faults planted in ranks, selected by the training's seed. planted_ranks.py, imported by ranks, applies them."""

from __future__ import annotations

from pathlib import Path

from fp8bench.nn.sizes import GPTConfig

FILE = str(Path(__file__).with_name("planted_ranks.py"))
SEED, WEIGHTS, AVERAGE, KILLED, SCALES = range(7001, 7006)
KILLED_AT = 7
# Tokens per validation, a sixteenth of the default, because validating would take most of the time.
LOOKED_AT = 256
SIZE = GPTConfig(256, 32, 1, 2, 2, 64, batch=4, sequence=16)
