"""What is planted in ranks, by the seed of the training. planted_ranks.py, which ranks import, does it."""

from __future__ import annotations

from pathlib import Path

from fp8bench.nn.sizes import GPTConfig

FILE = str(Path(__file__).with_name("planted_ranks.py"))
SEED, TEXT, SHARE, WEIGHTS, AVERAGE, KILLED, SCALES = range(7001, 7008)
KILLED_AT = 7
# Tokens of a validation, a sixteenth of the usual, as it would take most of the time.
LOOKED_AT = 256
SIZE = GPTConfig(256, 32, 1, 2, 2, 64, batch=4, sequence=16)
