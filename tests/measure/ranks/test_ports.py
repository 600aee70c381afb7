"""Nobody gets in while ranks run: who listens where, and what comes of those who connect."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fp8bench.model import Case, Level
from fp8bench.model.codec import PlainUnpickler
from tests.counts import sampled
from tests.measure.ranks.test_worker import SUITE, gone, left_behind

_LISTENING = "0A"
COMMANDS = {
    "suite": ("suite", SUITE, "--ranks", "2", "--quick", "--set", "fault=none", "--rounds", "20"),
    "collective": (
        "suite", "collective", "--ranks", "2", "--quick", "--set", "collective=all_reduce", "--set", "fp8=fp8_twoshot",
        "--set", "scaling=ms_amp",
    ),
    "parallel": ("suite", "parallel", "--ranks", "2", "--quick", "--set", "way=pp_1f1b,tp"),
    "train": ("train", "--ranks", "2", "--parallel", "ddp", "--steps", "6", "--dtypes", "fp32,bf16", "--seeds", "1"),
}  # fmt: skip


def sockets_of_test() -> set[str]:
    """The sockets of processes that this test started, from /proc."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.environ["PYTEST_CURRENT_TEST"].encode() in (folder / "environ").read_bytes():
                found |= {str(file.readlink()) for file in (folder / "fd").iterdir()}
    return found


def new_ports(known: set[str]) -> dict[int, str]:
    """New listening ports and their addresses in hexadecimal.

    Listening sockets are added to `known`, as only new ones justify a scan of all processes.
    """
    listening = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING and words[9] not in known:
                address, _, port = words[1].partition(":")
                listening[words[9]] = int(port, 16), address
    known |= listening.keys()
    own = sockets_of_test() if listening else set()
    return dict(where for inode, where in listening.items() if f"socket:[{inode}]" in own)


def is_loopback(address: str) -> bool:
    return address in ("0100007F", "00000000000000000000000001000000")


def run_watched(name: str, store: Path, meet: Callable[[int], object], pause: float) -> tuple[int, str, dict[int, str]]:
    """Runs a command with ranks and checks each new port at once.

    Returns its exit code, output, and the addresses of its ports.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "somewhere", "MASTER_PORT": "29500"}
    said: list[str] = []
    seen: dict[int, str] = {}
    known: set[str] = set()
    with subprocess.Popen(
        [sys.executable, "-m", "fp8bench", *COMMANDS[name], "--store", str(store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as running:
        try:
            reading = threading.Thread(target=lambda: said.append(running.communicate(timeout=540)[0]))
            reading.start()
            while reading.is_alive():
                for port, address in new_ports(known).items():
                    seen[port] = address
                    meet(port)
                time.sleep(pause)
        finally:
            running.kill()
    assert seen, said
    return running.returncode, " ".join(said[0].split()), seen


class Touch:
    """A pickle that leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


def knock(port: int, file: Path, kept: list[socket.socket]) -> None:
    """Sends what a stranger may send: nothing, junk, pickles, gloo's greeting with numbers of pairs."""
    code = pickle.dumps(Touch(file))
    greetings = [struct.pack("<q", number) + code for number in range(4)]
    for words in (b"", b"\x00", os.urandom(4096), code, *greetings):
        try:
            kept.append(socket.create_connection(("127.0.0.1", port), 1))
            kept[-1].sendall(words)
        except OSError:
            continue


@pytest.mark.slow
@pytest.mark.timeout(600)  # while other work runs
@pytest.mark.parametrize("name", sampled(["collective"], COMMANDS))
def test_strangers_that_connect_run_no_code(name: str, tmp_path: Path) -> None:
    kept: list[socket.socket] = []
    file = tmp_path / "was here"
    code, said, seen = run_watched(name, tmp_path, lambda port: knock(port, file, kept), 0.005)
    for connection in kept:
        connection.close()
    assert all(map(is_loopback, seen.values())) and not file.exists()
    assert code == 0 or "fp8bench: " in said or "failed" in said.lower(), said
    assert gone(), left_behind()


def greet_as_another_user(ports_told: int) -> int:
    """A process of an unprivileged user that sends the greeting of gloo's pairs to each given port."""
    child = os.fork()
    if child:
        return child
    try:
        "a".encode("idna")  # files that no other user may read
        os.setuid(65534)
        kept = []
        while told := os.read(ports_told, 4):
            for number in range(6):
                with contextlib.suppress(OSError):
                    kept.append(socket.create_connection(("127.0.0.1", struct.unpack("<i", told)[0]), 1))
                    kept[-1].sendall(struct.pack("<q", number))
    finally:
        os._exit(0)


@pytest.mark.slow
@pytest.mark.timeout(600)  # while other work runs
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_connection_of_another_user_is_reported(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    stranger = greet_as_another_user(reads)
    try:
        code, said, _ = run_watched(
            "collective", tmp_path, lambda port: os.write(writes, struct.pack("<i", port)), 0.002
        )
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
        os.close(reads)
        os.close(writes)
    assert code == 0 or "another user (number 65534) has connected" in said, said
    assert gone(), left_behind()


@dataclass(frozen=True)
class Attribute:
    """Pickled as an attribute of something: a member of an enum is, before Python 3.11.4."""

    of: object
    name: str

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.of, self.name)


def named(module: str, name: str) -> bytes:
    """A pickle that refers to this name in a module."""
    words = b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in (module, name))
    return b"\x80\x04" + words + b"\x93."


def test_answers_and_lists_of_objects_hold_plain_values_alone(tmp_path: Path) -> None:
    case = Case("gemm", (), "fp32", "cpu")
    assert PlainUnpickler(io.BytesIO(pickle.dumps([case, ("a", 1.5)]))).load() == [case, ("a", 1.5)]
    assert PlainUnpickler(io.BytesIO(pickle.dumps(Attribute(Level, "NATIVE")))).load() is Level.NATIVE
    through = ("run", "replace.__globals__"), ("codec", "math.__loader__"), ("codec", "encode"), ("codec", "Enum")
    refused = [named(f"fp8bench.model.{one}", name) for one, name in through]
    refused += [named("subprocess", "Popen"), named("fp8bench.store.runs.run_file", "RunWriter")]
    refused += [pickle.dumps(Attribute(*one)) for one in ((Level, "mro"), (Level, "__class__"), (Case, "id"))]
    for written in (pickle.dumps(Touch(tmp_path / "was here")), *refused):
        with pytest.raises(pickle.UnpicklingError, match="not a frozen value"):
            PlainUnpickler(io.BytesIO(written)).load()
    assert not (tmp_path / "was here").exists()


def test_torch_unpickles_lists_of_objects_by_the_name_that_ranks_replace() -> None:
    import torch.distributed.distributed_c10d as c10d

    source = Path(str(c10d.__file__)).read_text()
    assert c10d._unpickler is pickle.Unpickler and source.count("_unpickler(") == 1
    assert "pickle.load" not in source
