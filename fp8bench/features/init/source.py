"""Finds a source from which another machine can install the same fp8bench."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

from fp8bench import __version__

_GIT_TIMEOUT_SECONDS = 10
# The form 'git@host:owner/name.git', which needs an SSH key that a build does not have.
_SSH_ADDRESS = re.compile(r"(?:ssh://)?git@([^:/]+)(?::\d+(?=/))?[:/](.+)")


def find_source() -> str:
    """Returns a requirement from which pip can install this fp8bench: a version of a package index, an address, or a
    git address with a commit. Returns '' if only this machine has the source.
    """
    try:
        direct_url_text = metadata.distribution("fp8bench").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    return format_recorded_requirement(direct_url_text) if direct_url_text else f"fp8bench=={__version__}"


def format_recorded_requirement(recorded: str) -> str:
    """Returns a requirement for pip, read from the record that pip wrote when it installed from an address (PEP 610).
    Returns '' if the record cannot be read.
    """
    try:
        return _format_install_requirement(json.loads(recorded))
    except (ValueError, AttributeError):  # the record is not JSON or not a mapping, or its address has an invalid port
        return ""


def _format_install_requirement(origin: dict[str, Any]) -> str:
    address = str(origin.get("url", ""))
    if commit := origin.get("vcs_info", {}).get("commit_id"):
        requirement, subfolder = _make_public_git_address(address, commit), origin.get("subdirectory")
        return f"{requirement}#subdirectory={subfolder}" if requirement and subfolder else requirement
    if "dir_info" in origin:
        folder = unquote(urlsplit(address).path)
        if _run_git(folder, "rev-parse", "--show-prefix") or not _run_git(folder, "branch", "-r", "--contains", "HEAD"):
            return ""  # the folder is inside a different repository, or its commit was not pushed
        return _make_public_git_address(
            _run_git(folder, "remote", "get-url", "origin"), _run_git(folder, "rev-parse", "HEAD")
        )
    return address if address.startswith("https://") else ""


def _make_public_git_address(address: str, commit: str) -> str:
    """Returns the public git address of a commit. A password is removed from it, because it must not be written into
    a file.
    """
    if match := _SSH_ADDRESS.fullmatch(address):
        address = f"https://{match[1]}/{match[2]}"
    address_parts = urlsplit(address)
    if address_parts.scheme != "https" or not address_parts.hostname or not commit:
        return ""
    host = address_parts.hostname + (f":{address_parts.port}" if address_parts.port else "")
    return f"git+https://{host}{address_parts.path}@{commit}"


def _run_git(folder: str, *arguments: str) -> str:
    command = ["git", "-C", folder, *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
