"""What the launcher's warden does last."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

from fp8bench.worker.ranks.launcher import _end_all


def test_the_launcher_is_waited_for(tmp_path: Path) -> None:
    """Ended at once it would leave its ranks to be asked how they ended, by whoever adopts them."""
    (folder := tmp_path / "launch").mkdir()
    with subprocess.Popen(("sleep", "0.5")) as launcher:
        waiting = threading.Thread(target=launcher.wait)
        waiting.start()
        _end_all(str(folder), launcher.pid)
        ended = launcher.returncode
        waiting.join()
    assert ended == 0 and not folder.exists()
