"""`load_dataset`: the named datasets, preprocessed as in section 4 of the paper."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt
from scipy import sparse

from augment_reduce.data.arrays import read_arrays
from augment_reduce.data.download import find_file, locate
from augment_reduce.data.files import DataFileError, PathLike, read_names
from augment_reduce.data.images import OmniglotImages, read_idx, read_omniglot_zip
from augment_reduce.data.reductions import Examples, frequent_labels, keep_labels, only_labels, reduce_labels
from augment_reduce.data.sparse_text import read_xml_repository
from augment_reduce.data.splits import Dataset, Split
from augment_reduce.data.text import TextDataset, load_text

OMNIGLOT_TRAIN_PER_CLASS = 16  # of 20 drawings; the other 4 are for testing
SYNTHETIC_CLASSES, SYNTHETIC_ROWS = 10_000, 300_000

LabelledName = Literal["mnist", "bibtex", "omniglot", "eurlex-4k", "amazoncat-13k", "debian-deps", "synthetic"]


@dataclass(frozen=True)
class Request:
    """The arguments of `load_dataset`."""

    name: str
    path: PathLike | None
    reduction: str | None
    min_count: int
    seed: int | None
    download: bool
    verify: bool
    progress: bool

    def file(self, role: str) -> PathLike:
        options = {"download": self.download, "verify": self.verify, "progress": self.progress}
        return locate(self.name, role, path=self.path, **options)


class Options(TypedDict, total=False):
    """The keyword arguments of `load_dataset`."""

    reduction: str | None
    min_count: int
    seed: int | None
    download: bool
    verify: bool
    progress: bool


# fmt: off
@overload
def load_dataset(name: LabelledName, path: PathLike | None = ..., **options: Unpack[Options]) -> Dataset: ...
@overload
def load_dataset(name: Literal["wordnet-glosses"], path: PathLike | None = ..., **options: Unpack[Options]) -> TextDataset: ...  # noqa: E501
@overload
def load_dataset(name: str, path: PathLike | None = ..., **options: Unpack[Options]) -> Dataset | TextDataset: ...
# fmt: on
def load_dataset(
    name: str,
    path: PathLike | None = None,
    *,
    reduction: str | None = None,
    min_count: int = 1,
    seed: int | None = 0,
    download: bool = True,
    verify: bool = True,
    progress: bool = True,
) -> Dataset | TextDataset:
    """Load a named dataset: see `DATASETS` for the names and docs/data.md for what each one is.

    Its files are searched in `path`, $AUGMENT_REDUCE_DATA, the user's cache and the package; missing ones are
    downloaded into the cache (unless `download=False`).

    - `reduction`: "first" or "all" for sets of labels; None is "all" for debian-deps and the paper's "first" elsewhere.
    - `min_count`: keep labels on at least this many training rows (words, for wordnet-glosses).
    - `seed`: of Omniglot's random split (16 training drawings of each class) and of the synthetic data. For Omniglot,
      None splits by people: the last 4 who drew an alphabet are for testing.
    - `verify`: refuse a file whose checksum is not the recorded one.
    """
    key = name.lower().replace("_", "-")
    if key not in DATASETS:
        near = difflib.get_close_matches(key, DATASETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Expected a dataset among {', '.join(DATASETS)}, but found {name!r}.{hint}")
    if min_count < 1:
        raise ValueError(f"Expected min_count of at least 1, but found {min_count}.")
    if seed is None and key == "synthetic":
        raise ValueError(
            "Expected a whole number as the seed of 'synthetic', but found None: only Omniglot knows that."
        )
    if key in SINGLE_LABEL and (reduction is not None or (min_count > 1 and key != "wordnet-glosses")):
        raise ValueError(
            f"Expected no reduction and no min_count for {key!r}, which has one label a row, but found "
            f"reduction={reduction!r}, min_count={min_count}. Leave them out."
        )
    return DATASETS[key](Request(key, path, reduction, min_count, seed, download, verify, progress))


def _mnist(request: Request) -> Dataset:
    """Pixels / 255."""
    parts = []
    for part in ("train", "test"):
        images, labels = read_idx(request.file(f"{part}-images")), read_idx(request.file(f"{part}-labels"))
        if len(images) != len(labels):
            raise DataFileError(
                request.file(f"{part}-labels"),
                expected=f"{len(images):,} labels, one an image",
                found=f"{len(labels):,}",
            )
        parts.append(Split(_pixels(images), labels.astype(np.int64)))
    return Dataset("mnist", parts[0], parts[1], [str(digit) for digit in range(10)])


def _pixels(images: np.ndarray) -> npt.NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


def _omniglot(request: Request) -> Dataset:
    """28 x 28 pixels / 255; of the 20 drawings of each class 16 for training and 4 for testing, drawn by `seed`.

    With seed None the first 16 people of each alphabet are for training and the last 4 for testing: no one is in both.
    """
    if find_file("omniglot", "prepared", request.path) is not None:
        found = prepared_omniglot(request.file("prepared"))
    else:
        found = read_omniglot_zip(request.file("background"), request.file("evaluation"))
    images, labels, alphabet, character = found.images, found.labels, found.alphabet, found.character
    sample, alphabets = found.sample, found.alphabet_names
    classes, first, y = np.unique(labels, return_index=True, return_inverse=True)
    note = f"{OMNIGLOT_TRAIN_PER_CLASS} of the drawings of each class for training, "
    if request.seed is None:
        in_train, note = sample <= OMNIGLOT_TRAIN_PER_CLASS, note + "by who drew them"
    else:
        in_train = choose_per_class(y, len(classes), OMNIGLOT_TRAIN_PER_CLASS, request.seed)
        note += f"drawn with seed {request.seed}"
    X = _pixels(images)
    names = [f"{alphabets[alphabet[i]]}/character{int(character[i]):02d}" for i in first]
    return Dataset("omniglot", Split(X[in_train], y[in_train]), Split(X[~in_train], y[~in_train]), names, notes=(note,))


def prepared_omniglot(path: PathLike) -> OmniglotImages:
    """The drawings as arrays in one npz archive, named as in `OmniglotImages`."""
    arrays, names = read_arrays(path, OmniglotImages._fields)
    missing = [name for name in OmniglotImages._fields if name not in arrays]
    if missing:
        raise DataFileError(path, expected=f"an array {missing[0]!r}", found=f"the arrays {sorted(names)[:20]}")
    parts: dict[str, Any] = dict(arrays)
    parts["alphabet_names"] = arrays["alphabet_names"].astype(str).reshape(-1).tolist()
    found = OmniglotImages(**parts)
    of_drawings, n = found[:-1], found.labels.size
    whole_numbers = all(array.dtype.kind in "iu" for array in of_drawings)
    if not whole_numbers or found.images.ndim != 3 or {array.shape[:1] for array in of_drawings} != {(n,)}:
        shapes = [array.shape for array in of_drawings]
        raise DataFileError(path, expected="whole numbers for each of the drawings", found=f"shapes {shapes}")
    if n and not 0 <= found.alphabet.min() <= found.alphabet.max() < len(found.alphabet_names):
        raise DataFileError(
            path, where="array 'alphabet'", expected=f"numbers below {len(found.alphabet_names)}", found="others"
        )
    return found


def choose_per_class(y: npt.NDArray[np.int64], n_classes: int, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """A mask with `count` rows of each class, uniformly at random: the `count` smallest of uniform numbers."""
    order = np.lexsort((np.random.default_rng(seed).random(len(y)), y))
    starts = np.searchsorted(y[order], np.arange(n_classes))
    rank = np.arange(len(y)) - starts[y[order]]
    mask = np.zeros(len(y), bool)
    mask[order[rank < count]] = True
    return mask


def _many_labels(request: Request, *, reduction: str = "first", scale: bool = False, names: bool = True) -> Dataset:
    """Label sets reduced to one label per example; test examples with unseen labels are dropped."""
    train, test = (read_xml_repository(request.file(part)) for part in ("train", "test"))
    if names:
        named = {"label_names": read_names(request.file("label-names")),
                 "feature_names": read_names(request.file("feature-names"))}  # fmt: skip
        for role, part in (("label-names", train.n_labels), ("feature-names", train.n_features)):
            found = len(named[role.replace("-", "_")])
            if found < part:
                raise DataFileError(request.file(role), expected=f"{part:,} names, one a line", found=f"{found:,}")
        train, test = replace(train, **named), replace(test, **named)
    notes: tuple[str, ...] = ()
    if scale:
        divide_by_training_maximum(train.X, test.X)
        notes = ("features divided by their training maximum",)
    if request.min_count > 1:
        train, kept = frequent_labels(train, request.min_count)
        test = keep_labels(test, kept)
        notes += (f"labels on at least {request.min_count} training rows",)
    reduction = request.reduction or reduction
    examples = reduce_labels(train, reduction)
    class_ids = np.unique(examples.y)
    tested = only_labels(reduce_labels(test, reduction), class_ids)
    ids = class_ids.tolist()
    return Dataset(
        request.name,
        _split(examples, class_ids),
        _split(tested, class_ids),
        [str(k) for k in ids] if train.label_names is None else [train.label_names[k] for k in ids],
        feature_names=train.feature_names,
        class_ids=class_ids,
        notes=(*notes, f"reduction {reduction!r}"),
    )


def _split(examples: Examples, class_ids: npt.NDArray[np.int64]) -> Split:
    source = examples.source
    whole = np.array_equal(examples.rows, np.arange(source.n_rows))
    return Split(source.X, np.searchsorted(class_ids, examples.y), None if whole else examples.rows, source)


def divide_by_training_maximum(train: sparse.csr_matrix, test: sparse.csr_matrix) -> None:
    """Divide every feature in place by its largest training value; features that are never positive are kept."""
    largest = np.zeros(train.shape[1], np.float32)
    np.maximum.at(largest, train.indices, train.data)
    largest[largest <= 0] = 1.0
    for part in (train, test):
        part.data /= largest[part.indices]


def _synthetic(request: Request) -> Dataset:
    """Section 4.1: 3e5 labels from 1e4 classes, p_k ∝ u_k² with u_k uniform on [0, 1]; no covariates, no test set.

    Classes that do not occur are left out, so K is about 9,035; `probabilities` are the p_k of the others, not
    renormalised.
    """
    rng = np.random.default_rng(request.seed)
    p = rng.random(SYNTHETIC_CLASSES) ** 2
    p /= p.sum()
    drawn = rng.choice(SYNTHETIC_CLASSES, size=SYNTHETIC_ROWS, p=p)
    classes, y = np.unique(drawn, return_inverse=True)
    X = sparse.csr_matrix((SYNTHETIC_ROWS, 0), dtype=np.float32)
    names = [str(k) for k in classes.tolist()]
    note = f"drawn with seed {request.seed}"
    return Dataset("synthetic", Split(X, y), None, names, probabilities=p[classes], notes=(note,))


def _wordnet(request: Request) -> TextDataset:
    files = {part: request.file(part) for part in ("train", "validation", "test")}
    return load_text(request.name, files, min_count=request.min_count)


SINGLE_LABEL = ("mnist", "omniglot", "synthetic", "wordnet-glosses")
DATASETS: dict[str, Callable[[Request], Dataset | TextDataset]] = {
    "mnist": _mnist,
    "bibtex": _many_labels,
    "omniglot": _omniglot,
    "eurlex-4k": lambda request: _many_labels(request, scale=True, names=False),
    "amazoncat-13k": lambda request: _many_labels(request, scale=True, names=False),
    "debian-deps": lambda request: _many_labels(request, reduction="all"),
    "wordnet-glosses": _wordnet,
    "synthetic": _synthetic,
}
