"""Atomic writes: to a temporary file in the same folder, which is then renamed to the target.

A crash or a kill at any moment leaves the old file or the new one. What happens to an existing target:

    a regular file     is replaced; its permission bits are kept, its owner and group where the system allows it
    a symbolic link    is kept; its target is replaced or created
    a hard link        is broken: the other names keep the old content
    a folder, FIFO, device or socket    is refused

The temporary file is locked while it is being written. A later write to the same folder removes temporary files that
are not locked: their writer was killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no flock: nothing is locked, and no abandoned file is removed
    fcntl = None  # type: ignore[assignment]

TEMPORARY = re.compile(r"\.augment-reduce-[0-9a-f]{8}\.part")
# Development versions before 0.1.0 did not lock their temporary files, so only old ones are considered abandoned.
UNLOCKED_PART, UNLOCKED_TMP = r"\.{}\.[a-z0-9_]{{8}}\.part", re.compile(r"\.tmp[A-Za-z0-9]{6}")
HOUR, DAY = 3600.0, 86400.0
HEAD_BYTES = 1 << 16  # bytes of a `.tmp` file searched for our mark

PathLike = str | os.PathLike[str]


def target_of(path: PathLike) -> Path:
    """The file that a write to `path` replaces or creates, links resolved; raises if that is impossible."""
    if not os.fspath(path):
        raise ValueError("Expected the name of a file to write, found an empty one.")
    shown, target = Path(path), Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {shown.parent} to write {shown.name} to; make it first.")
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return target
    except OSError as error:  # a name that is too long for the file system, say
        raise OSError(error.errno, error.strerror, str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{shown} is a folder; name a file in it, such as {shown / 'model.safetensors'}.")
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"Expected a regular file or a new name to write to, but {shown} is a FIFO, device or socket, which would "
            "be replaced. Name a file, and copy it there."
        )
    return target


def check_writable(path: PathLike, needed_bytes: int = 0) -> None:
    """Refuse a path that cannot be written, or has too little space, before any work is done."""
    target = target_of(path)
    folder = target.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise PermissionError(f"Cannot write into {folder}: {error.strerror}.") from error
    if target.exists() and _is_kept_by_others(target):
        raise PermissionError(
            errno.EPERM, "another user's file in a folder whose files only their owners may replace", str(path)
        )
    free = _free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: about {needed_bytes / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free",
            str(path),
        )


def _is_kept_by_others(target: Path) -> bool:
    """Whether the folder is sticky, as /tmp is, and both it and the file belong to others."""
    if not hasattr(os, "geteuid"):
        return False
    folder = target.parent.stat()
    return bool(folder.st_mode & stat.S_ISVTX) and os.geteuid() not in (0, folder.st_uid, target.stat().st_uid)


def _free_bytes(folder: Path) -> int | None:
    """Free bytes for this user, or None if unknown."""
    try:
        found = os.statvfs(folder)
    except (AttributeError, OSError):
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


@contextlib.contextmanager
def replaced_atomically(path: PathLike) -> Iterator[Path]:
    """A temporary file in the folder of `path`, renamed to `path` only if the body succeeds.

    An OSError (a full disk, say) names `path`, not the temporary file.
    """
    target = target_of(path)
    remove_abandoned(target)
    try:
        before = os.stat(target)
    except FileNotFoundError:
        before = None
    temporary, handle = Path(), -1
    try:
        while handle < 0:
            # Named before it is created: after an interrupt at any moment the name is known below.
            temporary = target.parent / f".augment-reduce-{secrets.token_hex(4)}.part"
            handle = _create(temporary, 0o666 if before is None else 0o600)
        yield temporary
        _sync(handle, temporary)
        if before is not None:
            _keep_permissions(temporary, before)
        if fcntl is None:  # Windows does not rename an open file
            os.close(handle)
            handle = -1
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if temporary.name:
                os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and str(error.filename) in ("None", str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        if handle >= 0:  # only now: the lock holds while it is open
            os.close(handle)
    sync_folder(target.parent)


def _create(temporary: Path, mode: int) -> int:
    """Create and lock the file; -1 if the name exists, or another process considered it abandoned."""
    try:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return -1
    if fcntl is None:
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # locked by another process between our two calls, and about to be removed
        os.close(handle)
        return -1
    except OSError:  # a file system without locks, where nothing is considered abandoned
        return handle
    if _is_same_file(handle, temporary):
        return handle
    os.close(handle)
    return -1


def _sync(handle: int, temporary: Path) -> None:
    """Sync the file to disk, also if the body replaced the temporary file by another."""
    if _is_same_file(handle, temporary):
        os.fsync(handle)
        return
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())


def _is_same_file(handle: int, path: PathLike) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _keep_permissions(temporary: Path, before: os.stat_result) -> None:
    """Copy permission bits, and owner and group if allowed, of the replaced file. If the group cannot be kept, group
    permissions are dropped: they were not meant for ours."""
    mode = stat.S_IMODE(before.st_mode) & 0o777
    if hasattr(os, "chown"):
        now = os.stat(temporary)
        if now.st_uid != before.st_uid:
            with contextlib.suppress(OSError):
                os.chown(temporary, before.st_uid, -1)
        if now.st_gid != before.st_gid:
            try:
                os.chown(temporary, -1, before.st_gid)
            except OSError:
                mode &= ~0o070
    os.chmod(temporary, mode)


def sync_folder(folder: Path) -> None:
    """Sync the folder, if the system can; the rename has happened in any case."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---- what killed writers left ----


def remove_abandoned(target: Path) -> None:
    """Remove abandoned temporary files from the folder of `target`."""
    if fcntl is None:
        return
    part = re.compile(UNLOCKED_PART.format(re.escape(target.name)))
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if TEMPORARY.fullmatch(entry.name):
                _remove_unlocked(entry.path)
            elif part.fullmatch(entry.name):
                _remove_unlocked(entry.path, HOUR)
            elif UNLOCKED_TMP.fullmatch(entry.name):
                _remove_unlocked(entry.path, DAY, b"augment-reduce model")


def _remove_unlocked(path: str, least_age: float = 0.0, mark: bytes = b"") -> None:
    """Remove an unlocked regular file, at least `least_age` seconds old, with `mark` in its first bytes."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or time.time() - found.st_mtime < least_age:
                return
            if mark not in os.pread(handle, HEAD_BYTES, 0):
                return
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(handle, path):
                os.unlink(path)
        finally:
            os.close(handle)


__all__ = ["check_writable", "replaced_atomically", "sync_folder", "target_of"]
