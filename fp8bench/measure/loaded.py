"""Where the code of this process comes from."""

from __future__ import annotations

import sys
from pathlib import Path


def modules_under(folder: Path) -> tuple[str, ...]:
    """The modules loaded from below a folder, links resolved. fp8bench's own, and installed packages, do not count."""
    top = folder.resolve()
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("fp8bench", "__main__"):
            continue
        # Modules that are made up (torch has some) give names of files that are nowhere.
        path = Path(file).resolve() if Path(file).is_absolute() else Path()
        if path.is_relative_to(top) and not {"site-packages", "dist-packages"} & set(path.parts):
            found.append(name)
    return tuple(found)
