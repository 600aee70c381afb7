"""fp8bench: does low precision pay here, what does it cost in numbers, has it changed, and can I believe it?

From Python: `fp8bench.run("transformer", dtypes=["fp8", "bf16"])` returns the Run; `fp8bench.table(run)` is what the
command line prints; `fp8bench.load("last")` reads a stored one, with its tables as pandas frames. Importing fp8bench
is cheap: torch is only ever imported by the worker (or, with isolation=False, by the call that measures).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fp8bench.api import (
        Run,
        findings,
        load,
        profile,
        resume,
        run,
        table,
    )
    from fp8bench.errors import Fp8benchError
    from fp8bench.features.audit.model import audit_model
    from fp8bench.features.fleet.api import load_fleet
    from fp8bench.features.train.api import (
        hugging_face_callback,
        lightning_callback,
        load_training,
        resume_training,
        train,
        watch,
    )
    from fp8bench.model import Case, Finding, Label, Phase, Record, Verdict
    from fp8bench.user_code.named import audited

_HOME = {
    "Case": "model",
    "Finding": "model",
    "Fp8benchError": "errors",
    "Label": "model",
    "Phase": "model",
    "Record": "model",
    "Run": "api",
    "Verdict": "model",
    "audit_model": "features.audit.model",
    "audited": "user_code.named",
    "findings": "api",
    "hugging_face_callback": "features.train.api",
    "lightning_callback": "features.train.api",
    "load": "api",
    "load_fleet": "features.fleet.api",
    "load_training": "features.train.api",
    "profile": "api",
    "resume": "api",
    "resume_training": "features.train.api",
    "run": "api",
    "table": "api",
    "train": "features.train.api",
    "watch": "features.train.api",
}

__all__ = [
    "Case",
    "Finding",
    "Fp8benchError",
    "Label",
    "Phase",
    "Record",
    "Run",
    "Verdict",
    "__version__",
    "audit_model",
    "audited",
    "findings",
    "hugging_face_callback",
    "lightning_callback",
    "load",
    "load_fleet",
    "load_training",
    "profile",
    "resume",
    "resume_training",
    "run",
    "table",
    "train",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import fp8bench` costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'fp8bench' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"fp8bench.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
