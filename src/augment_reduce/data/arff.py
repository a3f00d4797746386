"""Bibtex as published: sparse ARFF, 1,836 word attributes, then 159 labels named TAG_…

Converts such a file into three text files, as bytes; this is no general ARFF reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from augment_reduce.data.files import DataFileError, PathLike, decode_line, shown

LABEL_PREFIX = "TAG_"
ENTRY = re.compile(r"\s*(\d{1,9})\s+\S+\s*", re.ASCII)


def label_names(arff: bytes, path: PathLike = "the ARFF file") -> bytes:
    """One label name a line, in file order."""
    names = [name for name in _attributes(arff, path) if name.startswith(LABEL_PREFIX)]
    return "".join(f"{name}\n" for name in names).encode()


def feature_names(arff: bytes, path: PathLike = "the ARFF file") -> bytes:
    """One word a line, in file order."""
    names = [name for name in _attributes(arff, path) if not name.startswith(LABEL_PREFIX)]
    return "".join(f"{name}\n" for name in names).encode()


def to_repository_text(arff: bytes, path: PathLike = "the ARFF file") -> bytes:
    """The rows as XML-repository text: a header `N D K`, then `label,label feature:1 feature:1` lines."""
    names = _attributes(arff, path)
    is_label = [name.startswith(LABEL_PREFIX) for name in names]
    n_features = is_label.index(True) if True in is_label else len(names)
    if not all(is_label[n_features:]) or n_features == len(names):
        raise DataFileError(
            path, expected=f"labels named {LABEL_PREFIX}…, after the features", found="another order, or no label"
        )
    lines = []
    for number, line in _lines(arff, path):
        if not line.startswith("{"):
            continue
        entries = sorted(_entries(path, number, line, len(names)))
        labels = ",".join(str(i - n_features) for i in entries if i >= n_features)
        features = " ".join(f"{i}:1" for i in entries if i < n_features)
        lines.append(f"{labels} {features}\n")
    header = f"{len(lines)} {n_features} {len(names) - n_features}\n"
    return (header + "".join(lines)).encode()


def _lines(arff: bytes, path: PathLike) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(arff.split(b"\n"), start=1):
        yield number, decode_line(path, number, line).strip()


def _attributes(arff: bytes, path: PathLike) -> list[str]:
    names = []
    for number, line in _lines(arff, path):
        words = line.split()
        if words[:1] == ["@attribute"]:
            if len(words) < 2:
                raise DataFileError(path, line=number, expected="the name of an attribute", found=shown(line))
            names.append(words[1])
    return names


def _entries(path: PathLike, number: int, line: str, n_attributes: int) -> set[int]:
    """The attributes of a row `{index value, index value}`, each once."""
    found: set[int] = set()
    inside = line.strip("{} ")
    for entry in inside.split(",") if inside else []:
        match = ENTRY.fullmatch(entry)
        index = int(match[1]) if match else -1
        if not 0 <= index < n_attributes or index in found:
            raise DataFileError(
                path, line=number, expected=f"{{index value, …}} with indices below {n_attributes}, each once",
                found=shown(entry),
            )  # fmt: skip
        found.add(index)
    return found
