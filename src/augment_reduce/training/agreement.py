"""Checks before the first step that the ranks of a fit have the same settings, data, classes and seed.

Ranks that differ would not fail, but train on sums over classes of different rows or different draws. So short hashes
are compared once, and differences are named on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .._version import __version__
from ..kernels.rows import DenseRows, Rows
from ..sharding import RankError, Ranks
from .fitted import TrainingRows

AT_ONCE = 1 << 20  # numbers
OF_EACH_RANK = ("process_group", "n_jobs", "verbose", "device", "random_state")  # the seed is compared separately


def facts_of_fit(parameters: Mapping[str, Any], rows: TrainingRows, classes: np.ndarray) -> dict[str, Any]:
    """The values that must be equal on all ranks, for `Ranks.agree`."""
    return {
        "version": __version__,
        "the number of classes K": len(classes),
        "the number of rows": rows.X.n_rows,
        "the number of features": rows.X.n_features,
        "the classes (hash)": digest(classes),
        "X (hash)": digest(*arrays_of(rows.X)),
        "y (hash)": digest(rows.codes),
        "row weights (hash)": "none" if rows.weight is None else digest(rows.weight),
        "random_state": seed_as_text(parameters["random_state"]),
        **{name: as_text(value) for name, value in parameters.items() if name not in OF_EACH_RANK},
    }


def common_seed(ranks: Ranks, seed: int) -> int:
    """The first rank's seed, if none is set."""
    return int(ranks.gather(torch.tensor([seed]), "the seed")[0, 0])


def same_rows(ranks: Ranks, X: Any, codes: np.ndarray, error: Exception | None) -> None:
    """Before a prediction: raise unless all ranks have valid rows (`error` is None) of equal number, and the same
    labels."""
    found = ranks.raise_together(error, "a prediction", 0 if error is not None else int(X.shape[0]))
    if len(set(found)) > 1:
        raise RankError(f"Expected all ranks to predict the same rows, found {found} rows, rank by rank.")
    if len(codes):
        ranks.agree({"y (hash)": digest(codes)}, "the labels")


def arrays_of(X: Rows) -> tuple[np.ndarray, ...]:
    return (X.values,) if isinstance(X, DenseRows) else (X.values, X.indices, X.indptr)


def digest(*arrays: np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=8)
    for array in arrays:
        found.update(f"{array.shape}".encode())
        if array.dtype.hasobject:
            found.update("\0".join(f"{type(each).__name__} {each!r}" for each in array.ravel()).encode())
        else:
            flat = np.ascontiguousarray(array).reshape(-1)
            for first in range(0, len(flat), AT_ONCE):  # may be a file larger than memory
                found.update(flat[first : first + AT_ONCE].tobytes())
    return found.hexdigest()


def seed_as_text(random_state: Any) -> str:
    if isinstance(random_state, np.random.RandomState):
        return digest(*(np.asarray(part) for part in tuple(random_state.get_state(legacy=True))[1:]))
    return repr(random_state)


def as_text(value: Any) -> str:
    """repr(value); for objects whose repr has only their address, type and attributes instead."""
    if type(value).__repr__ is not object.__repr__ and " at 0x" not in repr(value):
        return repr(value)
    return f"{type(value).__qualname__}({', '.join(f'{k}={v!r}' for k, v in sorted(vars(value).items()))})"
