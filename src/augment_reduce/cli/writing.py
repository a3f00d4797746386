"""Where results go: checked before any work, and a trained model is not lost where its place fails."""

from __future__ import annotations

import contextlib
import itertools
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..atomic import check_writable, replaced_atomically

if TYPE_CHECKING:
    import numpy as np

    from ..estimator import AugmentReduceClassifier

STDOUT = Path("-")


class SavedElsewhereError(OSError):
    """The model could not be written where it was to go, and is in another file."""


def check_output(output: Path, inputs: Sequence[Path], option: str = "--output", needed_bytes: int = 0) -> None:
    """Refuse a place that cannot be written, or that is an input, before any work is done."""
    check_writable(output, needed_bytes)
    if any(output.exists() and given.exists() and output.samefile(given) for given in inputs):
        raise ValueError(f"{output} is also a file to be read; writing would destroy it. Choose another {option}.")


# ---- models ----


def model_bytes(model: AugmentReduceClassifier, X: Any, y: np.ndarray) -> int:
    """About as many as the file of this model will have, once it is trained on these rows."""
    import numpy as np
    import torch
    from scipy import sparse

    from ..defaults import Shape, resolve
    from ..edge import memory_bytes
    from ..noise import resolve_noise

    n_classes = len(np.unique(y))
    if n_classes < 2:  # which `fit` refuses
        return 0
    is_sparse = sparse.issparse(X)
    shape = Shape(X.shape[0], X.shape[1], n_classes, X.nnz if is_sparse else X.size, sparse=is_sparse)
    settings = resolve(model.get_params(deep=False), resolve_noise(model.model), shape, torch.float32)
    sizes = memory_bytes(settings, shape, early_stopping=False)
    return sum(sizes[name] for name in ("weights", "optimiser state", "per-row state"))


def save_model(model: AugmentReduceClassifier, output: Path) -> None:
    """Save a model that took long to train; where that fails somewhere else, and say where."""
    try:
        model.save(output)
        return
    except OSError as error:
        reason = error
    for folder in dict.fromkeys((output.parent.absolute(), Path.cwd(), Path(tempfile.gettempdir()))):
        other = _free_name(folder, output)
        try:
            model.save(other)
        except OSError:
            continue
        raise SavedElsewhereError(f"{_sentence(reason)} The model is whole, but in another file: {other}") from reason
    raise SavedElsewhereError(
        f"{_sentence(reason)} Nor could it be written elsewhere, so the model is lost. Make room, and fit again."
    ) from reason


def _free_name(folder: Path, output: Path) -> Path:
    stem, suffix = output.stem[:50], output.suffix[:20]
    names = (folder / f"{stem}-rescued{n or ''}{suffix}" for n in itertools.count())
    return next(name for name in names if not name.exists())


def _sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}." if error.filename is not None else str(error)


# ---- text ----


@contextlib.contextmanager
def opened(output: Path) -> Iterator[IO[str]]:
    """Standard output, a FIFO or a device as it is; or a file that appears under its name only when it is whole."""
    if output == STDOUT:
        yield sys.stdout
    elif is_special(output):
        with open(output, "w", encoding="utf-8", newline="") as stream:
            yield stream
    else:
        with replaced_atomically(output) as temporary, open(temporary, "w", encoding="utf-8", newline="") as stream:
            yield stream


def is_special(path: Path) -> bool:
    """Whether it is there, and neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
