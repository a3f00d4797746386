"""Rows larger than memory: a folder of npy files that are memory-mapped, never read as a whole.

    data.npy, indices.npy, indptr.npy    the CSR arrays of X (N, D)
    labels.npy                           a number in 0..K-1 for every row; missing if the rows have no labels
    classes.json                         the K labels by number, ascending
    feature_names.json                   the names of the D features, if they have any
    meta.json                            shape, dtypes and lengths of the files

Nothing is pickled. The lengths of all files and the numbers of `indptr` and `labels` are checked when the folder is
opened; the entries themselves when they are used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from augment_reduce.config.labels import Coded
from augment_reduce.data.arrays import as_data_errors
from augment_reduce.data.files import DataFileError, PathLike

FORMAT, VERSION = "augment-reduce rows", 1
META, CLASSES, FEATURES = "meta.json", "classes.json", "feature_names.json"
ARRAYS = ("data", "indices", "indptr", "labels")
KINDS = {"data": "biuf", "indices": "iu", "indptr": "iu", "labels": "iu"}
CLASS_KINDS: dict[str, type | tuple[type, ...]] = {"text": str, "int64": int, "float64": (int, float)}
AT_ONCE = 1 << 16  # numbers of a mapped array checked at a time
LARGEST = 2**62
AGAIN = "Convert the rows again (augment-reduce convert), or copy the whole folder again."


@dataclass(frozen=True)
class MappedData:
    """What `open_mapped` returns: memory-mapped rows X (N, D) and their labels; unpacks as `X, y = data`.

    `clf.fit(data)` trains without a copy of either. `data.y` are the labels themselves, an array in memory.
    """

    X: sparse.csr_matrix
    coded: Coded | None  # the labels by number; None: the rows have none
    path: Path
    feature_names: list[str] | None = None
    zero_based: bool | None = None  # of rows converted from svmlight: how their features were counted

    @cached_property
    def y(self) -> np.ndarray | None:
        return None if self.coded is None else self.coded.values()

    @property
    def classes(self) -> np.ndarray | None:
        return None if self.coded is None else self.coded.classes

    def __iter__(self) -> Iterator[Any]:
        return iter((self.X, self.y))

    def __len__(self) -> int:
        return int(self.X.shape[0])


def open_mapped(path: PathLike) -> MappedData:
    """Map the rows of a folder that `write_mapped` or `augment-reduce convert` wrote; an invalid one raises
    `DataFileError`."""
    folder = Path(path)
    meta = _meta(folder)
    n_rows, n_features = meta["shape"]
    n_entries, dtypes = meta["entries"], meta["dtypes"]
    lengths = {"data": n_entries, "indices": n_entries, "indptr": n_rows + 1, "labels": n_rows}
    arrays = {name: _mapped(folder / f"{name}.npy", name, dtypes[name], lengths[name]) for name in dtypes}
    _check_indptr(folder / "indptr.npy", arrays["indptr"], n_entries)
    coded = None
    if "labels" in arrays:
        classes = _classes(folder / CLASSES, meta["classes"], meta["classes_kind"])
        _check_labels(folder / "labels.npy", arrays["labels"], len(classes))
        coded = Coded(arrays["labels"], classes)
    names = _names(folder / FEATURES, n_features) if meta["feature_names"] else None
    X = as_csr(arrays["data"], arrays["indices"], arrays["indptr"], (n_rows, n_features))
    return MappedData(X, coded, folder, names, meta["zero_based"])


def is_mapped_folder(path: PathLike) -> bool:
    return Path(path).is_dir() and (Path(path) / META).is_file()


def as_csr(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """A CSR matrix of these very arrays: scipy's constructor would copy int64 indices into int32."""
    X = sparse.csr_matrix((1, shape[1]), dtype=data.dtype)
    X.data, X.indices, X.indptr = data, indices, indptr
    X._shape = shape
    return X


# ---- the description ----


def _meta(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise DataFileError(
            folder, expected="a folder of mapped rows", found="a file" if folder.exists() else "nothing there",
            advice="augment-reduce convert makes one from a file of rows.",
        )  # fmt: skip
    meta = _json(folder / META)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataFileError(folder / META, expected=f"the description of {FORMAT}", found="another", advice=AGAIN)
    if meta.get("version") != VERSION:
        raise DataFileError(
            folder / META, expected=f"version {VERSION}, which this release reads",
            found=f"version {str(meta.get('version'))[:20]}", advice="Use the release that wrote it, or convert again.",
        )  # fmt: skip
    labelled = meta.get("classes") is not None
    wanted = {
        "shape": lambda v: isinstance(v, list) and len(v) == 2 and all(map(_is_size, v)),
        "entries": _is_size,
        "dtypes": lambda v: isinstance(v, dict) and v.keys() == set(ARRAYS if labelled else ARRAYS[:3]),
        "classes": lambda v: v is None or _is_size(v),
        "classes_kind": lambda v: v in CLASS_KINDS if labelled else v is None,
        "feature_names": lambda v: type(v) is bool,
        "zero_based": lambda v: v is None or type(v) is bool,
    }
    for name, fits in wanted.items():
        if name not in meta or not fits(meta[name]):
            found = "none" if name not in meta else str(meta[name])[:60]
            raise DataFileError(folder / META, expected=f"a valid entry {name!r}", found=found, advice=AGAIN)
    return meta


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _json(path: Path) -> Any:
    try:
        with as_data_errors(path, "JSON", AGAIN):
            return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataFileError(path, expected="a file of a folder of mapped rows", found="none", advice=AGAIN) from None


def _classes(path: Path, n_classes: int, kind: str) -> np.ndarray:
    found = _json(path)
    fits = isinstance(found, list) and len(found) == n_classes
    fits = fits and all(isinstance(name, CLASS_KINDS[kind]) and not isinstance(name, bool) for name in found)
    if not fits:
        raise DataFileError(path, expected=f"a list of {n_classes:,} labels, each {kind}", found="others", advice=AGAIN)
    with as_data_errors(path, f"labels of {kind}", AGAIN):
        classes = np.asarray(found, np.str_ if kind == "text" else kind)
    if not (classes[1:] > classes[:-1]).all():
        raise DataFileError(path, expected="labels in ascending order, each once", found="others", advice=AGAIN)
    return classes


def _names(path: Path, n_features: int) -> list[str]:
    found = _json(path)
    if not (isinstance(found, list) and len(found) == n_features and all(isinstance(name, str) for name in found)):
        raise DataFileError(path, expected=f"a list of {n_features:,} names", found="another", advice=AGAIN)
    return found


# ---- the arrays ----


def _mapped(path: Path, name: str, dtype: Any, length: int) -> np.ndarray:
    """The memory map of an npy file, whose header, size and description agree."""
    try:
        with open(path, "rb") as file, as_data_errors(path, "an array as numpy.save writes it", AGAIN):
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, found = read(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DataFileError(path, expected="a file of a folder of mapped rows", found="none", advice=AGAIN) from None
    unknown = found.hasobject or found.kind not in KINDS[name] or found == np.float16 or not found.isnative
    if unknown or str(found) != dtype:
        raise DataFileError(path, expected=f"numbers of {str(dtype)[:20]}", found=str(found)[:40], advice=AGAIN)
    if shape != (length,):
        raise DataFileError(
            path, expected=f"an array of {length:,} numbers, as {META} says", found=f"shape {shape}", advice=AGAIN
        )
    if size != offset + length * found.itemsize:
        raise DataFileError(
            path, expected=f"the {offset + length * found.itemsize:,} bytes of its header and {length:,} numbers",
            found=f"{size:,}", advice=AGAIN,
        )  # fmt: skip
    if not length:  # which cannot be mapped
        return np.empty(0, found)
    return np.memmap(path, found, "r", offset, (length,))


def _parts(array: np.ndarray, overlap: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, len(array), AT_ONCE):
        yield first, np.asarray(array[first : first + AT_ONCE + overlap])


def _check_indptr(path: Path, indptr: np.ndarray, n_entries: int) -> None:
    rises = all((part[1:] >= part[:-1]).all() for _, part in _parts(indptr, 1))
    if int(indptr[0]) != 0 or int(indptr[-1]) != n_entries or not rises:
        raise DataFileError(
            path, expected=f"numbers that rise from 0 to {n_entries:,}, the entries", found="others", advice=AGAIN
        )


def _check_labels(path: Path, labels: np.ndarray, n_classes: int) -> None:
    for first, part in _parts(labels):
        wrong = np.flatnonzero((part < 0) | (part >= n_classes))
        if len(wrong):
            raise DataFileError(
                path, where=f"row {first + int(wrong[0])}", expected=f"numbers of labels from 0 to {n_classes - 1:,}",
                found=f"{int(part[wrong[0]])}", advice=AGAIN,
            )  # fmt: skip
