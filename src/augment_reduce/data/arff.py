"""Bibtex as its home publishes it: sparse ARFF, 1,836 word attributes, then 159 labels named TAG_…

Three views of such a file, each as the bytes of a text file; nothing here is a general ARFF reader.
"""

from __future__ import annotations

LABEL_PREFIX = "TAG_"


def _attributes(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("@attribute ")]


def label_names(arff: bytes) -> bytes:
    """One label name a line, in file order."""
    names = [name for name in _attributes(arff.decode("utf-8")) if name.startswith(LABEL_PREFIX)]
    return "".join(f"{name}\n" for name in names).encode()


def feature_names(arff: bytes) -> bytes:
    """One word a line, in file order."""
    names = [name for name in _attributes(arff.decode("utf-8")) if not name.startswith(LABEL_PREFIX)]
    return "".join(f"{name}\n" for name in names).encode()


def to_repository_text(arff: bytes) -> bytes:
    """The rows as XML-repository text: a header `N D K`, then `label,label feature:1 feature:1` lines."""
    text = arff.decode("utf-8")
    names = _attributes(text)
    n_features = next(i for i, name in enumerate(names) if name.startswith(LABEL_PREFIX))
    lines = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        entries = sorted(int(entry.split()[0]) for entry in line.strip("{} ").split(","))
        labels = ",".join(str(i - n_features) for i in entries if i >= n_features)
        features = " ".join(f"{i}:1" for i in entries if i < n_features)
        lines.append(f"{labels} {features}\n")
    header = f"{len(lines)} {n_features} {len(names) - n_features}\n"
    return (header + "".join(lines)).encode()
