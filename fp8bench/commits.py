"""Which commits a repository has, and which one a word means."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path


def commit_named(word: str, folder: Path) -> str | None:
    """The commit that a word means in the repository of a folder ('HEAD', a beginning); None where it means none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{word}^{{commit}}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def gone(commits: Iterable[str], folder: Path) -> frozenset[str]:
    """Those that the repository of a folder does not have; none outside of a repository, or where git is not there."""
    asked = list(dict.fromkeys(commits))
    if not asked:
        return frozenset()
    command = ["git", "cat-file", "--batch-check"]
    try:
        done = subprocess.run(
            command, cwd=folder, input="\n".join(asked) + "\n", capture_output=True, text=True, errors="replace",
            timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return frozenset(line.removesuffix(" missing") for line in lines if line.endswith(" missing"))
