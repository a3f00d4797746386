"""Text output (standard output, a device, a file written atomically); the expected size of a model file."""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..support.atomic import replaced_atomically

if TYPE_CHECKING:
    import numpy as np

    from ..estimator import AugmentReduceClassifier

STDOUT = Path("-")


# ---- models ----


def model_bytes(model: AugmentReduceClassifier, X: Any, y: np.ndarray) -> int:
    """About the size of this model's file after training on these rows."""
    import numpy as np
    import torch
    from scipy import sparse

    from ..config.defaults import Shape, resolve
    from ..config.validation import memory_bytes
    from ..model.noise import resolve_noise

    n_classes = len(np.unique(y))
    if n_classes < 2:  # `fit` will refuse it
        return 0
    is_sparse = sparse.issparse(X)
    shape = Shape(X.shape[0], X.shape[1], n_classes, X.nnz if is_sparse else X.size, sparse=is_sparse)
    settings = resolve(model.get_params(deep=False), resolve_noise(model.model), shape, torch.float32)
    sizes = memory_bytes(settings, shape, early_stopping=False)
    return sum(sizes[name] for name in ("weights", "optimiser state", "per-row state"))


# ---- text ----


@contextlib.contextmanager
def opened(output: Path) -> Iterator[IO[str]]:
    """A text stream: standard output, a FIFO or a device; or a file that is renamed into place when complete."""
    if output == STDOUT:
        yield sys.stdout
    elif is_special(output):
        with open(output, "w", encoding="utf-8", newline="") as stream:
            yield stream
    else:
        with replaced_atomically(output) as temporary, open(temporary, "w", encoding="utf-8", newline="") as stream:
            yield stream


def is_special(path: Path) -> bool:
    """Whether it exists and is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
