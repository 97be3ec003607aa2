"""Safe access to files that other users may have created: they are read up to a size, and locked
and replaced without following links."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_BYTES = 1 << 22  # of a file that is read or written
_SECONDS = 60.0  # timeout of a writer that waits for another
_STEP = 0.01


def read_text(path: Path) -> str:
    """The text of a regular file of at most MOST_BYTES; ValueError for any other.

    The file is opened before it is checked, so that it cannot be exchanged in between.
    """
    with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content.decode()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Excludes other writers of ``path`` by locking ``PATH.lock``, which is never written to, and
    may be another user's.

    Raises:
        ValueError: ``PATH.lock`` is a link or not a regular file.
        TimeoutError: another process kept the lock for a minute.
    """
    lock = Path(f"{path}.lock")
    if lock.is_symlink():
        raise ValueError(f"{lock} is a link; remove it")
    handle = _opened_lock(lock)
    try:
        _wait(handle, lock)
        yield
    finally:
        os.close(handle)


def replace(path: Path, text: str) -> None:
    """Replaces a file atomically, and keeps its mode. A link is replaced itself, not its target."""
    if len(content := text.encode()) > MOST_BYTES:
        raise ValueError(f"{path} would have {len(content)} bytes; at most {MOST_BYTES} are read")
    name = path.with_name(f".{os.urandom(8).hex()}.tmp")
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(handle, stat.S_IMODE(path.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def rename_unreadable(path: Path) -> Path:
    """Renames a file to the first free name of ``PATH.unreadable``, ``PATH.unreadable2``, ..., and
    returns that."""
    number = 1
    while os.path.lexists(aside := Path(f"{path}.unreadable{number if number > 1 else ''}")):
        number += 1
    os.rename(path, aside)
    return aside


def _opened_lock(lock: Path) -> int:
    """A descriptor of the lock file; read-only for another user's file, which can be locked, too,
    but not on NFS. An existing file is opened without O_CREAT, which the system may refuse."""
    try:
        return _opened(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except PermissionError:
        if not os.path.lexists(lock):
            raise
        return _opened(lock, os.O_RDONLY | os.O_NOFOLLOW)


def _opened(path: Path, flags: int) -> int:
    """A descriptor of a regular file; opening a pipe by mistake does not block."""
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is no regular file")
    return handle


def _wait(handle: int, lock: Path) -> None:
    end = time.monotonic() + _SECONDS
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"another process keeps {lock} locked") from None
        time.sleep(_STEP)
