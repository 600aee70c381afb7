"""fp8bench: does low precision pay on this machine, how much accuracy does it cost, has it changed, and is it certain?

From Python: `fp8bench.run("transformer", dtypes=["fp8", "bf16"])` returns the Run; `fp8bench.table(run)` is the table
of the command line; `fp8bench.load("last")` reads a stored run. Importing fp8bench is cheap: only the worker imports
torch (or, with isolation=False, the call that measures).
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_MODULE_OF_NAME = {
    "Case": "model",
    "CommandResult": "cli.outputs",
    "Finding": "model",
    "Fp8benchError": "errors",
    "HighAccumulation": "features.train.lab.step_optimizer",
    "Label": "model",
    "Phase": "model",
    "Record": "model",
    "Run": "api",
    "Verdict": "model",
    "audit_model": "features.audit.model",
    "audited": "user_code.named",
    "compare_streams": "features.train.api",
    "findings": "api",
    "hugging_face_callback": "features.train.api",
    "lightning_callback": "features.train.api",
    "load": "api",
    "load_training": "features.train.api",
    "profile": "api",
    "resume": "api",
    "resume_training": "features.train.api",
    "run": "api",
    "suite": "api",
    "table": "api",
    "train": "features.train.api",
    "watch": "features.train.api",
}

# The commands that can also be called from Python. The parser of a command defines the options, defaults and errors of
# the call.
_COMMAND_CALLS = ("ablate", "advise", "audit", "compare", "duel", "gate", "sensitivity")
__all__ = [*sorted(("__version__", *_MODULE_OF_NAME, *_COMMAND_CALLS))]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Loads a public name on first use, so that `import fp8bench` is fast."""
    import importlib

    if name in _COMMAND_CALLS:
        value = importlib.import_module("fp8bench.cli.calls").make_command_call(name)
    elif name in _MODULE_OF_NAME:
        value = getattr(importlib.import_module(f"fp8bench.{_MODULE_OF_NAME[name]}"), name)
        # Many functions of the api modules have arguments that are also options of a command, so add the help of these.
        if _MODULE_OF_NAME[name].endswith("api") and not isinstance(value, type):
            importlib.import_module("fp8bench.cli.calls").explain_arguments(value.__name__, value)
    else:
        suggestion = importlib.import_module("fp8bench.suggestions").guess_intended_name("call", name, __all__)
        suggestion_text = f". Did you mean {suggestion!r}?" if suggestion and not name.startswith("_") else ""
        raise AttributeError(f"module 'fp8bench' has no attribute {name!r}{suggestion_text}")
    # Python calls __getattr__ only for missing names, so later uses are fast.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
