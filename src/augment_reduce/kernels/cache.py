"""Compiled kernels on disk, under a key that covers everything they were compiled from.

Numba's own cache compares the source file of the kernel it loads and nothing else, but our kernels inline functions of
other files: after an upgrade it would go on using the old ones. Here the key holds a digest of all kernel sources, and
the versions of Numba and of what the kernels' constants are computed with.

One file per compiled signature: a header, the SHA-256 of the payload, the payload (Numba's own serialisation, a
pickle). A file that was cut short or changed does not match its checksum and is compiled again and replaced. Whoever
can write such a file can run code in this process, so only files and folders are used that belong to this user, to
root, or to the owner of the installed package, and that nobody else may write to.

A cache that cannot be used costs compile time, never a fit: one warning says so, and what to do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import pickle
import pkgutil
import platform
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
import scipy
from numba import njit
from numba.core import bytecode, compiler, event, serialize
from numba.core.compiler_lock import global_compiler_lock

HEADER = b"augment-reduce compiled kernel 2\n"
SUFFIX = ".kernel"
FOLDER = "augment-reduce-kernels"
GENERATIONS = 4  # folders of other versions of the sources that are kept
# The folder of the kernels. Whatever else they import from, constants for one, is named below: a test looks.
KERNELS = "cpu"
IMPORTED = ("kernels.constants", "kernels.protocol", "kernels.rows", "kernels.threads")
# Settings of Numba that change the code it makes.
FLAGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "ENABLE_AVX", "CPU_NAME", "CPU_FEATURES")


def number_functions_apart() -> None:
    """Start Numba's numbering of compiled functions at a random number in this process.

    Numba names a compiled function after its source and a number, counted from 1 in every process. Of two functions
    of one name the linker uses the first for both. Functions generated from one source, such as the steps of two row
    rules, have the same number if two processes each compiled one of them. A third process that loads both from disk
    would then run one of them in place of the other.
    """
    bytecode.FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))


# Numba may rename this attribute: then nothing is kept on disk.
NUMBERED = hasattr(bytecode.FunctionIdentity, "_unique_ids")
if NUMBERED:
    number_functions_apart()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=number_functions_apart)


def cached_njit(of: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit`, with compiled code kept on disk. For functions of a module, of which each has a name of its own.

    `of` is for loops that are generated: the name of the kernels, among ours, that their free variables are.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if function.__closure__ and of is None:
            raise TypeError(f"{function.__qualname__} has free variables, which the cache's key would not cover.")
        if of is not None:  # compiled code is linked by name, too
            function.__qualname__ = f"{function.__name__}_{of}"
        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # kernels run as they are written, under a debugger
            return np.errstate(all="ignore")(function)
        dispatcher = njit(**options)(function)
        dispatcher._cache = KernelCache(function)
        return dispatcher

    return decorate


class KernelCache:
    """What Numba's dispatcher asks for compiled signatures of one function; see `numba.core.caching._Cache`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self.enabled = NUMBERED

    @property
    def cache_path(self) -> str | None:
        written_to = folders().write
        return None if written_to is None else str(written_to)

    def enable(self) -> None:
        self.enabled = NUMBERED

    def disable(self) -> None:
        self.enabled = False

    def flush(self) -> None:
        """Forget what is on disk of this function."""
        for folder in folders().read:
            for file in folder.glob(f"{self.name}-*{SUFFIX}"):
                with contextlib.suppress(OSError):
                    file.unlink()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled signature, or None where it has to be compiled."""
        if not self.enabled:
            return None
        target_context.refresh()
        name = self.file_name(sig, target_context.codegen())
        for folder in folders().read:
            payload = read_trusted(folder / name)
            if payload is None:
                continue
            try:
                found = compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))
            except Exception as error:  # whatever it is, compiling anew is right
                warn_once(f"A compiled kernel in {folder} could not be loaded ({type(error).__name__}: {error}).")
                continue
            if tuple(found.signature.args) == arguments_of(sig):
                return found
        return None

    def save_overload(self, sig: Any, compiled: Any) -> None:
        """Keep it for other processes, unless there is no place to."""
        folder = folders().write
        if folder is None or not self.enabled or sources_digest.__wrapped__() != sources_digest():
            return  # where files changed since this process imported them, nobody knows what was compiled
        try:
            payload = serialize.dumps(compiled._reduce())
            write_whole(folder / self.file_name(sig, compiled.codegen), payload)
        except Exception as error:
            stop_writing()
            warn_once(f"Compiled kernels could not be written to {folder} ({type(error).__name__}: {error}).")

    def file_name(self, sig: Any, codegen: Any) -> str:
        code = self.function.__code__.co_code  # changed sources that were imported before they changed
        key = (environment(), self.name, repr(arguments_of(sig)), codegen.magic_tuple(), hashlib.sha256(code).digest())
        return f"{self.name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}{SUFFIX}"


def arguments_of(sig: Any) -> tuple:
    return tuple(getattr(sig, "args", sig))


# ---- the key ----


@functools.cache
def sources_digest() -> str:
    """SHA-256 of the sources of all kernels, and of the modules whose constants they hold."""
    digest = hashlib.sha256()
    for name in source_modules():
        spec = importlib.util.find_spec(name)
        assert spec is not None
        data: bytes = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]  # an archive, or byte code, too
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def source_modules() -> list[str]:
    kernels, _, _ = __name__.rpartition(".")
    root, _, _ = kernels.rpartition(".")
    here = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / KERNELS)])]
    names = [f"{kernels}.{KERNELS}.{name}" for name in here]
    return sorted([*names, *(f"{root}.{name}" for name in IMPORTED)])


@functools.cache
def environment() -> tuple:
    """What else compiled code depends on, but for the processor, which is part of every key."""
    flags = tuple((name, repr(getattr(numba.config, name, None))) for name in FLAGS)
    versions = tuple(module.__version__ for module in (numba, llvmlite, np, scipy))
    return sources_digest(), versions, platform.python_implementation(), sys.version_info[:3], flags


# ---- where ----


class Folders(NamedTuple):
    read: list[Path]  # in this order
    write: Path | None


_FOLDERS: Folders | None = None
_LOCK = threading.RLock()
_WARNED = False
if hasattr(os, "register_at_fork"):
    # A fork waits for the compiler, and takes both locks along: a child that had them from a thread of its parent would
    # wait for that thread for ever.
    for _lock in (_LOCK, global_compiler_lock):
        os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def folders() -> Folders:
    """Where compiled kernels are looked for and kept; found once per process."""
    global _FOLDERS
    with _LOCK:
        if _FOLDERS is None:
            _FOLDERS = find_folders()
        return _FOLDERS


def stop_writing() -> None:
    global _FOLDERS
    with _LOCK:
        _FOLDERS = folders()._replace(write=None)


def find_folders() -> Folders:
    """The first that can be written to, and those before it that can be read."""
    read: list[Path] = []
    for base, suffix, lasts in candidates():
        folder = base / f"{FOLDER}-{sources_digest()[:16]}{suffix}"
        if not prepared(folder):
            continue
        read.append(folder)
        if os.access(folder, os.W_OK | os.X_OK):
            forget_old_generations(folder, suffix)
            if not lasts:
                warn_once(f"Compiled kernels are kept in {folder}, which a restart may empty.")
            return Folders(read, folder)
    warn_once("There is no folder to keep compiled kernels in.")
    return Folders(read, None)


def candidates() -> Iterator[tuple[Path, str, bool]]:
    """(folder, what sets this user's subfolder apart, whether it outlives a restart): those that Numba would choose,
    then the one of temporary files."""
    of_user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    if numba.config.CACHE_DIR:  # type: ignore[attr-defined]
        yield Path(numba.config.CACHE_DIR), of_user, True  # type: ignore[attr-defined]
        return
    if Path(__file__).parent.is_dir():  # not in an archive
        yield Path(__file__).parent / "__pycache__", "", True
    with contextlib.suppress(RuntimeError, KeyError):  # no home
        yield user_cache_folder(), "", True
    with contextlib.suppress(OSError):  # no folder for temporary files
        yield Path(tempfile.gettempdir()), of_user, False


def user_cache_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "augment-reduce"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "augment-reduce"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "augment-reduce"


def prepared(folder: Path) -> bool:
    """Whether the folder is there, made if need be, and safe to read code from."""
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o755, exist_ok=True)
        return is_trusted(os.lstat(folder), stat.S_ISDIR)
    except OSError:
        return False


def is_trusted(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Whether it belongs to somebody whose code runs here anyway, and nobody else may write to it."""
    if not is_kind(status.st_mode):
        return False
    if not hasattr(os, "getuid"):  # Windows: the folders of a user are the user's own
        return True
    return status.st_uid in trusted_users() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@functools.cache
def trusted_users() -> frozenset[int]:
    """This user, root, and who owns the sources that are compiled."""
    owners = {os.getuid(), 0}
    with contextlib.suppress(OSError):
        owners.add(os.stat(__file__).st_uid)
    return frozenset(owners)


def forget_old_generations(folder: Path, suffix: str) -> None:
    """Remove folders of other versions of the sources, but for the last few used."""
    with contextlib.suppress(OSError):
        os.utime(folder)
        others = [
            other for other in folder.parent.glob(f"{FOLDER}-{'[0-9a-f]' * 16}{suffix}") if other.name != folder.name
        ]
        for other in sorted(others, key=lambda each: each.stat().st_mtime)[:-GENERATIONS]:
            if is_trusted(os.lstat(other), stat.S_ISDIR):
                shutil.rmtree(other, ignore_errors=True)


# ---- files ----


def read_trusted(file: Path) -> bytes | None:
    """The payload of a file; None where there is none, none to be trusted, or not a whole one."""
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as opened:
            if not is_trusted(os.fstat(handle), stat.S_ISREG):
                return None
            content = opened.read()
    except OSError:
        return None
    start = len(HEADER) + hashlib.sha256().digest_size
    checksum, payload = content[len(HEADER) : start], content[start:]
    return payload if content.startswith(HEADER) and hashlib.sha256(payload).digest() == checksum else None


def write_whole(file: Path, payload: bytes) -> None:
    """So that other processes see all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem[-32:]}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(HEADER + hashlib.sha256(payload).digest() + payload)
            opened.flush()
            if hasattr(os, "fchmod"):
                os.fchmod(handle, 0o644)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def warn_once(what: str) -> None:
    global _WARNED
    with _LOCK:
        if _WARNED:
            return
        _WARNED = True
    warnings.warn(
        f"{what} Kernels that are not kept are compiled again in every process, which takes up to a minute; results "
        "are the same. Set NUMBA_CACHE_DIR to a folder of your own that can be written to and lasts.",
        RuntimeWarning,
        stacklevel=2,
    )


# ---- how long it took ----


class _CompileTimer(event.Listener):
    """Seconds that each thread has spent compiling or loading kernels, waiting for the compiler's lock included."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def on_start(self, event: Any) -> None:
        of = self.of_thread
        of.depth = getattr(of, "depth", 0) + 1
        if of.depth == 1:
            of.since = time.perf_counter()

    def on_end(self, event: Any) -> None:
        of = self.of_thread
        if getattr(of, "depth", 0) < 1:
            return
        of.depth -= 1
        if of.depth == 0:
            of.seconds = self.seconds() + time.perf_counter() - of.since

    def seconds(self) -> float:
        return float(getattr(self.of_thread, "seconds", 0.0))


_TIMER = _CompileTimer()
event.register("numba:compiler_lock", _TIMER)


def compile_seconds() -> float:
    """Seconds that this thread has spent compiling or loading kernels so far."""
    return _TIMER.seconds()
