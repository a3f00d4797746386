"""Available memory of this process, and MemoryErrors with sizes.

The machine's free memory is one limit. In a container or a batch job there are others, and a process that exceeds them
is killed without a message. So the limits of its control groups (versions 1 and 2, and all parents) and its resource
limits are checked, too, before anything large is allocated.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ..kernels.threads import get_num_threads

UNLIMITED = 1 << 60  # version 1 says "no limit" with a number a little below 2^63
# Compiling, loading libraries and starting threads need additional memory and address space. Without enough address
# space these abort the process instead of raising an error, so this much has to remain. Measured: docs/running.md.
ADDRESS_SPACE, OF_A_THREAD = 500 << 20, 72 << 20  # per thread: a stack, and what malloc reserves
WHEN_LOADED = 200 << 20  # instead of both, after a first complete fit or prediction: for more kernels
OVERHEAD = 350 << 20  # memory: added for fits larger than this, so that small ones run anywhere


_loaded = False


def available_bytes(root: Path = Path("/")) -> int | None:
    """Available memory, or None if unknown. `root` contains `proc` and `sys`."""
    found = [_free_on_machine(root), *_left_in_groups(root)]
    if root == Path("/"):
        found.append(_left_of_address_space(root))
    known = [max(0, size) for size in found if size is not None]
    return min(known) if known else None


def shortage(needed: int, mapped: int | None = None) -> int | None:
    """The available bytes if they are fewer than `needed`; None if they suffice or are unknown.

    `mapped`: additional address space, by default for kernels and their threads.
    """
    available, address_space = available_bytes(), _left_of_address_space(Path("/"))
    if mapped is None:
        mapped = WHEN_LOADED if _loaded else ADDRESS_SPACE + OF_A_THREAD * get_num_threads()
    if address_space is not None and needed + mapped > address_space:
        return max(0, address_space - mapped)
    overhead = OVERHEAD if needed > OVERHEAD else 0
    return max(0, available - overhead) if available is not None and needed + overhead > available else None


@contextlib.contextmanager
def memory_errors(what: str, needed: int, *, loads: bool = False) -> Iterator[None]:
    """Turn any failure for lack of memory into a MemoryError with sizes. `loads`: the body may compile kernels."""
    global _loaded
    try:
        yield
        _loaded = _loaded or loads
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_about_memory(error):
            raise
        available = available_bytes()
        left = "" if available is None else f", of which {available / 1e9:.2f} GB are left"
        raise MemoryError(
            f"{what} needs about {needed / 1e9:.2f} GB{left}, and an allocation failed: {error}. Free some memory, or "
            "raise the limit of this process (ulimit -v, the container's memory limit)."
        ) from error


def is_about_memory(error: BaseException) -> bool:
    """Whether it is numpy's MemoryError, torch's RuntimeError, the system's OSError, or a failure to start a thread."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("alloc_cpu", "can't allocate memory", "can't start new thread", "bad_alloc", "Unable to allocate")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


# ---- the machine ----


def _free_on_machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if root != Path("/"):
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


# ---- the process ----


def _left_of_address_space(root: Path) -> int | None:
    """Bytes left of RLIMIT_AS and RLIMIT_DATA."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    used = {}
    for line in _lines(root / "proc/self/status"):
        if line.startswith(("VmSize:", "VmData:")):
            used[line[:6]] = int(line.split()[1]) * 1024
    limits = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
    soft = [(resource.getrlimit(kind)[0], used.get(name, 0)) for kind, name in limits]
    left = [limit - taken for limit, taken in soft if limit != resource.RLIM_INFINITY]
    return min(left) if left else None


# ---- control groups ----


def _left_in_groups(root: Path) -> Iterator[int | None]:
    """Bytes left in the control groups of this process and all their parents."""
    mounts = list(_group_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        for mounted, top, at in mounts:
            if mounted != version:
                continue
            left = _left_in_2 if version == 2 else _left_in_1
            for folder in _upwards(root / at.lstrip("/"), _below(path, top)):
                yield left(folder)


def _group_mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """(version, mounted group, mount point) of the control-group file systems for memory."""
    found = False
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        top, at = _unescaped(fields[3]), _unescaped(fields[4])
        if kind[0] == "cgroup2":
            found = True
            yield 2, top, at
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            found = True
            yield 1, top, at
    if not found:
        yield 2, "/", "/sys/fs/cgroup"
        yield 1, "/", "/sys/fs/cgroup/memory"


def _below(path: str, top: str) -> list[str]:
    """The path from the mounted group down to this process's. If it is not below (a container that sees the host's
    path), only the mounted group is known."""
    steps, of_top = [s for s in path.split("/") if s], [s for s in top.split("/") if s]
    if steps[: len(of_top)] != of_top or ".." in steps:
        return []
    return steps[len(of_top) :]


def _upwards(mount: Path, steps: list[str]) -> Iterator[Path]:
    for n in range(len(steps), -1, -1):
        yield mount.joinpath(*steps[:n])


def _left_in_2(folder: Path) -> int | None:
    """memory.high counts, too: above it the system throttles a process until it frees memory, which a fit cannot."""
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    return _left(limits, _number(folder / "memory.current"), _statistics(folder).get("inactive_file", 0))


def _left_in_1(folder: Path) -> int | None:
    statistics = _statistics(folder)
    limits = [_number(folder / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit")]
    reclaimable = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return _left(limits, _number(folder / "memory.usage_in_bytes"), reclaimable)


def _left(limits: list[int | None], used: int | None, reclaimable: int) -> int | None:
    """The limit minus usage; inactive file cache counts as free."""
    known = [limit for limit in limits if limit is not None and limit < UNLIMITED]
    if not known:
        return None
    return min(known) - max(0, (used or 0) - reclaimable)


def _statistics(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(folder / "memory.stat"))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    """The number in a file; None for "max" or a missing file."""
    for line in _lines(file):
        return int(line) if line.strip().isdigit() else None
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(path: str) -> str:
    """mountinfo writes blanks and their like as \\040."""
    for code in ("040", "011", "012", "134"):
        path = path.replace(f"\\{code}", chr(int(code, 8)))
    return path
