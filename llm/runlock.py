"""One process group at a time writes into a run folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from llm.errors import UserError

LOCK_FILE = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_held: set[Path] = set()  # a record lock does not keep out its own process


class RunLock:
    """A lock on `run_dir` that ends with the process, however it ends.

    It is a POSIX record lock: the kernel drops it at death, the processes that a data loader forks do not inherit it,
    and NFS carries it between hosts. Where a file system has no locks, the owner that the file names decides: one that
    is dead on this host has lost it, one on another host keeps it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir.resolve() / LOCK_FILE
        self.descriptor = -1

    def acquire(self) -> None:
        """Take the lock; UserError that names the owner where another process has it."""
        if self.path in _held:
            raise UserError(self._refusal("this very process"))
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read_owner(self.descriptor)
            if error.errno not in UNSUPPORTED or _may_live(owner):
                os.close(self.descriptor)
                raise UserError(self._refusal(_describe(owner))) from error
        self._write_owner({"host": socket.gethostname(), "pid": os.getpid(), "since": time.ctime()})
        _held.add(self.path)

    def release(self) -> None:
        """Give the lock back."""
        if self.path in _held:
            _held.discard(self.path)
            with suppress(OSError):  # the folder may be gone
                os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)

    def _write_owner(self, owner: dict[str, object]) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(owner).encode(), 0)

    def _refusal(self, owner: str) -> str:
        return (
            f"run_dir={self.path.parent} is in use by {owner}. "
            "Wait for it to end, or choose another run_dir for a second run."
        )


def holder(run_dir: Path) -> tuple[str | None, bool]:
    """Who holds the lock of a run folder, in words (None: nobody does), and whether that process may be alive.

    For those who only look: nothing is locked. Of a process on another host nobody can tell, so it may be.
    """
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None, False
    try:
        owner = _read_owner(descriptor)
    finally:
        os.close(descriptor)
    return (_describe(owner), _may_live(owner)) if owner else (None, False)


def _read_owner(descriptor: int) -> dict[str, object]:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, object]) -> str:
    if not owner:
        return "another process"
    return f"process {owner.get('pid')} on {owner.get('host')} (since {owner.get('since')})"


def _may_live(owner: dict[str, object]) -> bool:
    """Could this owner still run? On another host nobody can tell."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or owner.get("host") != socket.gethostname():
        return bool(owner)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
