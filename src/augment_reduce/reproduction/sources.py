"""The data of a study: its files, or random data of their shape for timing."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from ..data import Dataset, DatasetNotFoundError, load_dataset, random_like
from ..data.registry import HOMES
from .settings import STUDIES, Study


@dataclass(frozen=True)
class Source:
    """Training rows and, if there are any, test rows; `identity` distinguishes sets of rows."""

    dataset: Dataset
    X: Any
    y: np.ndarray
    X_test: Any | None
    y_test: np.ndarray | None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Not of the labels alone: two splits with equal class counts have the same ones."""
        parts = (self.X.data, self.X.indices, self.X.indptr) if sparse.issparse(self.X) else (self.X,)
        features = 0
        for part in parts:
            features = zlib.crc32(np.ascontiguousarray(part).data, features)
        labels = zlib.crc32(np.ascontiguousarray(self.y).data)
        return {**self.dataset.statistics(), "labels_crc32": labels, "features_crc32": features}


@lru_cache(maxsize=1)
def load(study: Study, path: Path | None, seed: int) -> Source:
    """The rows of a study, as the paper prepares them, split by `seed` (`Study.seed_of_rows`); the last is cached."""
    if study.of_shape is not None:
        dataset = random_like(study.of_shape)
    else:
        found = load_dataset(study.name, path, seed=seed)
        assert isinstance(found, Dataset)
        dataset = found
    X, y = dataset.train
    if X.shape[1] == 0:  # scikit-learn requires a column: one without entries, whose weights are never updated
        X = sparse.csr_matrix((X.shape[0], 1), dtype=np.float32)
    X_test, y_test = (None, None) if dataset.test is None else dataset.test
    return Source(dataset, X, y, X_test, y_test)


def how_to_get(name: str) -> str:
    """Where to get the files of a dataset and where to put them, without paths of this machine."""
    home = HOMES[name]
    files = ", ".join(dict.fromkeys(file.names[0] for file in home.files.values()))
    return (
        f"{home.page}. {home.advice} Put {files} into {home.folders[0]}/ below the folder that you name with --data or "
        "with AUGMENT_REDUCE_DATA."
    )


def survey(names: Iterable[str], path: Path | None) -> dict[str, dict[str, Any]]:
    """Table 1 of the data found: the statistics by dataset, or under "missing" what to get and where to put it."""
    if path is not None and not path.is_dir():
        raise NotADirectoryError(
            f"Expected --data to be the folder that holds mnist/, bibtex/ and so on, but there is no folder {path}."
        )
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            dataset = load(STUDIES[name], path, STUDIES[name].data_seed).dataset
        except DatasetNotFoundError:
            found[name] = {"missing": how_to_get(name)}
        else:
            anew = ["every other seed draws its own"] if STUDIES[name].splits_anew else []
            found[name] = {**dataset.statistics(), "notes": [*dataset.notes, *anew]}
    return found
