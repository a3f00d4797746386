"""Kernels, and their compiled code on disk.

Numba keeps compiled kernels beside their source and looks for changes in a kernel's own file only, though ours are made
of functions from several. So whatever was compiled from other sources than these is removed before it is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path


def forget_stale(folder: Path) -> bool:
    """Remove the index of what Numba kept in `folder` unless it was compiled from today's sources; whether it was not.

    Where nothing can be written nothing was kept there either.
    """
    with_numbers_of_theirs = (folder.parent / name for name in ("optim.py", "noise.py", "gaussian.py"))
    sources = [*sorted(folder.glob("_cpu_*.py")), *with_numbers_of_theirs]
    today = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    stamp = folder / "__pycache__" / "kernels.sha256"
    with contextlib.suppress(OSError):
        if stamp.read_text() == today:
            return False
    with contextlib.suppress(OSError):
        for index in stamp.parent.glob("*.nbi"):
            index.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(today)
    return True


with contextlib.suppress(OSError):  # sources in an archive: nothing is kept beside them
    forget_stale(Path(__file__).parent)
