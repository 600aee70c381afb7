"""Autograd's device thread without a GPU: a fake accelerator whose tensors wrap CPU tensors.

Registration is global, so it runs in a separate process. The API is private and may vanish.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_NONE = 77
_BEFORE = """import os, sys, threading, torch
from torch.utils._pytree import tree_map
try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
    empty = torch._C._acc.create_empty_tensor
except (ImportError, AttributeError) as error:
    print(error)
    sys.exit(77)

register("pretended")

class Pretended(torch.Tensor):
    @staticmethod
    def __new__(cls, wrapped):
        made = empty(tuple(wrapped.shape), wrapped.dtype)
        made.__class__ = cls
        return made

    def __init__(self, wrapped):
        self.wrapped = wrapped

def on_cpu(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.wrapped if isinstance(value, Pretended) else value

def compute(operator, *args, **kwargs):
    result = operator(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
    return tree_map(lambda value: Pretended(value) if isinstance(value, torch.Tensor) else value, result)

library = torch.library.Library("_", "IMPL")
library.fallback(compute, "PrivateUse1")
"""
# The engine's thread may still be leaving Python: ending the interpreter now would abort the process.
_AFTER = """
sys.stdout.flush()
os._exit(0)
"""


def run_pretended(script: str) -> list[str]:
    """The output of a script that uses `Pretended(tensor)`; skips if torch has no Python accelerators."""
    command = [sys.executable, "-W", "error", "-c", _BEFORE + script + _AFTER]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if done.returncode == _NONE:
        pytest.skip(f"this torch has no Python accelerators: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
