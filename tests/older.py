"""Files in the format of older versions, without line numbers and checksums, so that tests can change them."""

from __future__ import annotations

import json
import re
from pathlib import Path

_CHECKSUM_FIELD = re.compile(rb'(,"digest":"\w+")?(,"line":\d+)?,"sum":"\w+"}', re.MULTILINE)


def without_sums(content: bytes) -> bytes:
    return _CHECKSUM_FIELD.sub(b"}", content)


def as_older(path: Path) -> Path:
    """The same file without numbers and checksums."""
    path.write_bytes(without_sums(path.read_bytes()))
    return path


def changed_document(path: Path) -> dict[str, object]:
    """The content of a JSON document without its checksum, so that a test can change it."""
    content = json.loads(path.read_text())
    content.pop("sum", None)
    return dict(content)
