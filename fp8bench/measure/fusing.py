"""The worker's side of compiling quantisers: which wait for it, what becomes of them, and how often they ran how.

Asks fp8bench.formats.operators, where a quantiser is one operator that runs compiled as soon as it has been compiled in
this process, and as many operations until then.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

from fp8bench.errors import Fp8benchError

_OPERATORS = "fp8bench.formats.operators"
_LONGEST_REASON = 200


class Fusing:
    """Compiles what was asked for. What does not compile stays as it is, and is not tried again."""

    def __init__(self) -> None:
        self._failed: dict[Hashable, str] = {}

    def waiting(self) -> tuple[Hashable, ...]:
        """What was asked for, is not compiled, and may yet be."""
        operators = _operators()
        if operators is None:
            return ()
        return tuple(kernel for kernel in operators.wanted() if kernel not in self._failed)

    def compile(self) -> None:
        """Compile all that waits, one by one.

        Whatever goes wrong is no fault of the case: it runs, and says that its quantisers were eager.
        """
        for kernel in self.waiting():
            try:
                _operators().compile_kernels((kernel,))
            except Exception as error:  # noqa: BLE001 - a compiler may fail in any way
                self._failed[kernel] = _reason(error)

    def why_eager(self) -> str:
        """Why some stay eager, '' if none does."""
        return next(iter(self._failed.values()), "")

    def calls(self) -> tuple[int, int]:
        """How often quantisers have run in this process: as many operations, and as one compiled kernel."""
        operators = _operators()
        return (0, 0) if operators is None else (operators.eager_calls(), operators.fused_calls())


def _operators() -> Any:
    """The module, if anybody here has imported it: who has not, has called none of its operators."""
    return sys.modules.get(_OPERATORS)


def _reason(error: BaseException) -> str:
    """'compiling failed: InvalidCxxCompiler: No working C++ compiler found', in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if isinstance(error, Fp8benchError) else type(error).__name__
    words = ": ".join(part for part in (kind, lines[0] if lines else "") if part)
    return f"compiling failed: {words[:_LONGEST_REASON].rstrip('.')}"
