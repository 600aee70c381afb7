"""Finds a source from which another machine can install this fp8bench."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

from fp8bench import __version__

_GIT_SECONDS = 10
# 'git@host:owner/name.git', which needs a key that a build does not have.
_SSH_ADDRESS = re.compile(r"(?:ssh://)?git@([^:/]+)(?::\d+(?=/))?[:/](.+)")


def find_source() -> str:
    """Returns pip's name for it: a version of an index, an address, or a git address at a commit; '' if only this
    machine has it."""
    try:
        recorded = metadata.distribution("fp8bench").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    return name_source(recorded) if recorded else f"fp8bench=={__version__}"


def name_source(recorded: str) -> str:
    """Returns the same from pip's record of an installation from an address (PEP 610); '' if that cannot be read."""
    try:
        return _name_origin(json.loads(recorded))
    except (ValueError, AttributeError):  # not JSON, not a mapping, or an invalid port
        return ""


def _name_origin(origin: dict[str, Any]) -> str:
    address = str(origin.get("url", ""))
    if commit := origin.get("vcs_info", {}).get("commit_id"):
        named, below = _name_commit(address, commit), origin.get("subdirectory")
        return f"{named}#subdirectory={below}" if named and below else named
    if "dir_info" in origin:
        folder = unquote(urlsplit(address).path)
        if _ask_git(folder, "rev-parse", "--show-prefix") or not _ask_git(folder, "branch", "-r", "--contains", "HEAD"):
            return ""  # a part of a different repository, or a commit that only this machine has
        return _name_commit(_ask_git(folder, "remote", "get-url", "origin"), _ask_git(folder, "rev-parse", "HEAD"))
    return address if address.startswith("https://") else ""


def _name_commit(address: str, commit: str) -> str:
    """Returns the public form of a git address at a commit, without a password, which must not be written into a
    file."""
    if match := _SSH_ADDRESS.fullmatch(address):
        address = f"https://{match[1]}/{match[2]}"
    parts = urlsplit(address)
    if parts.scheme != "https" or not parts.hostname or not commit:
        return ""
    host = parts.hostname + (f":{parts.port}" if parts.port else "")
    return f"git+https://{host}{parts.path}@{commit}"


def _ask_git(folder: str, *question: str) -> str:
    command = ["git", "-C", folder, *question]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
