"""Problems for the zoo: real data where they are found, else drawn from a known model. Half of them choose the defaults
("choose"), the other half only reports ("report").

A problem is a function of a seed, which draws its rows and its split. Files are read from the folder of data beside the
checkout (`--data`); where they are missing the problem is left out and named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn import datasets
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer

from augment_reduce.data import load_dataset


@dataclass
class Problem:
    """Rows and labels 0..K-1; every label of a test row is that of a training row, too."""

    X: Any
    y: np.ndarray
    test_X: Any
    test_y: np.ndarray

    @property
    def n_classes(self) -> int:
        return int(self.y.max()) + 1


@dataclass(frozen=True)
class Entry:
    name: str
    half: str  # "choose" or "report"
    make: Callable[[Path, int], Problem]


ZOO: list[Entry] = []


def problem(name: str, half: str) -> Callable[[Callable[[Path, int], Problem]], Callable[[Path, int], Problem]]:
    def enter(make: Callable[[Path, int], Problem]) -> Callable[[Path, int], Problem]:
        ZOO.append(Entry(name, half, make))
        return make

    return enter


def rng_of(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])


def of_parts(X: Any, y: np.ndarray, test_X: Any, test_y: np.ndarray) -> Problem:
    """Labels renumbered by those of the training rows; test rows with another label are left out."""
    classes, codes = np.unique(y, return_inverse=True)
    seen = np.isin(test_y, classes)
    return Problem(X, codes, test_X[seen], np.searchsorted(classes, test_y[seen]))


def split(X: Any, y: np.ndarray, rng: np.random.Generator, n_test: float = 0.3, most: int | None = None) -> Problem:
    order = rng.permutation(len(y))[:most]
    n = int(n_test * len(order))
    return of_parts(X[order[n:]], y[order[n:]], X[order[:n]], y[order[:n]])


def from_softmax(X: Any, weight: np.ndarray, bias: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels of a true softmax: the class of the largest score plus Gumbel noise."""
    y = np.empty(X.shape[0], dtype=np.int64)
    step = max(1, 20_000_000 // len(bias))
    for first in range(0, len(y), step):
        psi = np.asarray(X[first : first + step] @ weight.T) + bias
        y[first : first + step] = (psi + rng.gumbel(size=psi.shape)).argmax(1)
    return y


def sparse_rows(rng: np.random.Generator, n: int, d: int, lengths: np.ndarray, decay: float = 1.0) -> sp.csr_matrix:
    """Counts of features with Zipf frequencies: rows of so many tokens."""
    p = (np.arange(d) + 2.0) ** -decay
    tokens = np.searchsorted(np.cumsum(p / p.sum()), rng.random(lengths.sum())).clip(max=d - 1)
    X = sp.csr_matrix((np.ones(len(tokens), np.float32), tokens, np.concatenate([[0], np.cumsum(lengths)])), (n, d))
    X.sum_duplicates()
    return X


# ---- text ----


def _debian_text(data: Path, name: str) -> dict[str, Any]:
    file = np.load(data / "debian_text" / f"debian_{name}.npz")
    D = int(file["n_features"])
    found = {key: file[key] for key in file.files}
    for part in ("train", "test"):
        parts = tuple(found[f"{part}_{key}"] for key in ("data", "indices", "indptr"))
        found[part] = sp.csr_matrix((parts[0].astype(np.float32), *parts[1:]), (len(parts[2]) - 1, D))
    return found


@problem("text-section", "choose")
def text_section(data: Path, seed: int) -> Problem:
    file = _debian_text(data, "section")
    return of_parts(file["train"], file["train_y"], file["test"], file["test_y"])


@problem("text-first-tag", "report")
def text_first_tag(data: Path, seed: int) -> Problem:
    """The lowest tag of a package, of several hundred."""
    file = _debian_text(data, "tags")
    parts: list[Any] = []
    for part in ("train", "test"):
        begins = file[f"{part}_label_indptr"]
        has = np.diff(begins) > 0
        parts += [file[part][has], file[f"{part}_label_indices"][begins[:-1][has]]]
    return of_parts(*parts)


@problem("text-svd", "report")
def text_svd(data: Path, seed: int) -> Problem:
    """Dense embeddings: the first 100 singular vectors of the text."""
    file = _debian_text(data, "section")
    svd = TruncatedSVD(100, random_state=seed).fit(file["train"])
    X, test = (svd.transform(file[part]).astype(np.float32) for part in ("train", "test"))
    return of_parts(X, file["train_y"], test, file["test_y"])


@problem("text-hashed-next-word", "report")
def next_word(data: Path, seed: int) -> Problem:
    """The next word of a definition, from hashed words before it, 2^14 features: ten thousand classes."""
    import gzip

    rng, X, y = rng_of(seed, "next"), [], []
    for part, n in (("train", 60_000), ("test", 6_000)):
        with gzip.open(data / "wordnet_glosses" / f"{part}.txt.gz", "rt") as file:
            lines = [line.split() for line in file]
        chosen = [lines[i] for i in rng.permutation(len(lines))[:n] if len(lines[i]) > 3]
        at = [int(rng.integers(2, len(words))) for words in chosen]
        y.append(np.array([words[i] for words, i in zip(chosen, at, strict=True)]))
        context = [" ".join([f"last_{w[i - 1]}", f"then_{w[i - 2]}", *w[:i]]) for w, i in zip(chosen, at, strict=True)]
        hashing = HashingVectorizer(n_features=2**14, alternate_sign=False, token_pattern=r"\S+")
        X.append(hashing.transform(context).astype(np.float32))
    return of_parts(X[0], y[0], X[1], y[1])


@problem("dependencies-first", "choose")
def dependencies(data: Path, seed: int) -> Problem:
    """Raw token counts; the first dependency of a package."""
    found = load_dataset("debian-deps", min_count=5)
    X, y = found.train
    of_row = np.random.default_rng(seed).permutation(len(y))[:60_000]
    of_test = np.random.default_rng(seed).permutation(len(found.test.y))[:5_000]
    return of_parts(X[of_row], y[of_row], found.test.X[of_test], found.test.y[of_test])


@problem("bibtex", "choose")
def bibtex(data: Path, seed: int) -> Problem:
    found = load_dataset("bibtex", data / "bibtex", download=False)
    return of_parts(*found.train, found.test.X, found.test.y)


@problem("counts-of-lengths", "report")
def counts_of_lengths(data: Path, seed: int) -> Problem:
    """Raw counts, rows of 3 to 300 tokens; classes by what they say, K 40."""
    rng = rng_of(seed, "lengths")
    X = sparse_rows(rng, 12_000, 3_000, np.exp(rng.uniform(np.log(3), np.log(300), 12_000)).astype(np.int64))
    weight, bias = 0.25 * rng.standard_normal((40, 3_000)), 0.5 * rng.standard_normal(40)
    return split(X, from_softmax(X, weight, bias, rng), rng)


# ---- images ----


@problem("digits", "choose")
def digits(data: Path, seed: int) -> Problem:
    X, y = datasets.load_digits(return_X_y=True)
    return split(X, y, rng_of(seed, "digits"))


@problem("mnist-12000", "choose")
def mnist(data: Path, seed: int) -> Problem:
    found = load_dataset("mnist", data / "mnist", download=False)
    X = np.round(255 * found.train.X).astype(np.float32)
    of_row = rng_of(seed, "mnist").permutation(len(X))[:12_000]
    return of_parts(X[of_row], found.train.y[of_row], np.round(255 * found.test.X).astype(np.float32), found.test.y)


@problem("omniglot-400", "report")
def omniglot(data: Path, seed: int) -> Problem:
    """400 characters, 16 drawings of each to learn from."""
    file = np.load(data / "omniglot" / "omniglot_28x28.npz")
    rng, labels = rng_of(seed, "omniglot"), file["labels"].astype(np.int64)
    rows = np.flatnonzero(np.isin(labels, rng.permutation(1623)[:400]))
    X, y = file["images"][rows].reshape(len(rows), -1).astype(np.float32), labels[rows]
    out = np.isin(file["sample"][rows], rng.permutation(20)[:4] + 1)
    return of_parts(X[~out], y[~out], X[out], y[out])


# ---- tables ----


@problem("iris", "choose")
def iris(data: Path, seed: int) -> Problem:
    return split(*datasets.load_iris(return_X_y=True), rng_of(seed, "iris"))


@problem("wine", "report")
def wine(data: Path, seed: int) -> Problem:
    return split(*datasets.load_wine(return_X_y=True), rng_of(seed, "wine"))


@problem("breast-cancer", "choose")
def breast_cancer(data: Path, seed: int) -> Problem:
    return split(*datasets.load_breast_cancer(return_X_y=True), rng_of(seed, "breast"))


@problem("breast-standardised", "report")
def breast_standardised(data: Path, seed: int) -> Problem:
    X, y = datasets.load_breast_cancer(return_X_y=True)
    return split((X - X.mean(0)) / X.std(0), y, rng_of(seed, "standard"))


@problem("cars", "report")
def cars(data: Path, seed: int) -> Problem:
    """Which of six vehicles: prices, ranges, and one-hot kinds and fuels of all six."""
    import pandas as pd

    table = pd.read_csv(data / "discrete_choice" / "Ecdat_Car.csv.gz")
    y = table["choice"].astype(str).to_numpy()
    rows = pd.get_dummies(table.drop(columns=[c for c in table if c in ("choice", "rownames")]))
    return split(rows.to_numpy(np.float64), y, rng_of(seed, "cars"))


@problem("yogurt", "choose")
def yogurt(data: Path, seed: int) -> Problem:
    """Which brand, from features and prices."""
    import pandas as pd

    table = pd.read_csv(data / "discrete_choice" / "Ecdat_Yogurt.csv.gz")
    y = table["choice"].astype(str).to_numpy()
    rows = table.drop(columns=[c for c in table if c in ("choice", "rownames", "id")])
    return split(rows.to_numpy(np.float64), y, rng_of(seed, "yogurt"))


@problem("one-hot", "choose")
def one_hot(data: Path, seed: int) -> Problem:
    """Eight categories of 30 levels each, as indicators; K 25."""
    rng = rng_of(seed, "onehot")
    level = (30 * rng.random((6_000, 8)) ** 2).astype(np.int64)
    X = sp.csr_matrix(
        (np.ones(48_000), (level + 30 * np.arange(8)).ravel(), np.arange(0, 48_001, 8)), (6_000, 240)
    )  # fmt: skip
    return split(X, from_softmax(X, 0.6 * rng.standard_normal((25, 240)), rng.standard_normal(25), rng), rng)


@problem("columns-of-scales", "report")
def columns_of_scales(data: Path, seed: int) -> Problem:
    rng = rng_of(seed, "scales")
    X, y = datasets.make_classification(2_000, 15, n_informative=8, n_classes=5, random_state=int(rng.integers(2**31)))
    return split(X * 10.0 ** rng.uniform(-3, 3, 15) + 10.0 ** rng.uniform(-2, 3, 15), y, rng)


@problem("blobs-far-away", "choose")
def blobs_far_away(data: Path, seed: int) -> Problem:
    X, y = datasets.make_blobs(500, 5, centers=5, cluster_std=3, random_state=18 + seed)
    return split(X + 1000, y, rng_of(seed, "far"))


@problem("blobs-200", "report")
def blobs_200(data: Path, seed: int) -> Problem:
    X, y = datasets.make_blobs(3_000, 20, centers=200, cluster_std=3, random_state=seed)
    return split(X, y, rng_of(seed, "blobs"))


@problem("classes-50", "choose")
def classes_50(data: Path, seed: int) -> Problem:
    X, y = datasets.make_classification(
        3_000, 30, n_informative=15, n_classes=50, n_clusters_per_class=1, random_state=seed, class_sep=2.0
    )
    return split(X, y, rng_of(seed, "fifty"))


@problem("few-rows", "report")
def few_rows(data: Path, seed: int) -> Problem:
    """200 rows, 40 columns, 5 classes; a test set large enough to tell."""
    rng = rng_of(seed, "few")
    X = rng.standard_normal((4_200, 40))
    y = from_softmax(X, 0.5 * rng.standard_normal((5, 40)), np.zeros(5), rng)
    return of_parts(X[:200], y[:200], X[200:], y[200:])


@problem("noisy-labels", "report")
def noisy_labels(data: Path, seed: int) -> Problem:
    """Twenty well separated classes, 40 % of the labels replaced by any."""
    rng = rng_of(seed, "noisy")
    X, y = datasets.make_blobs(5_000, 16, centers=20, cluster_std=2.5, random_state=seed)
    return split(X, np.where(rng.random(5_000) < 0.4, rng.integers(20, size=5_000), y), rng)


@problem("duplicate-rows", "choose")
def duplicate_rows(data: Path, seed: int) -> Problem:
    """600 different rows of text-like counts, each some ten times, with labels of their own."""
    rng = rng_of(seed, "twice")
    own = sparse_rows(rng, 900, 800, rng.integers(5, 15, 900))
    row = rng.integers(900, size=9_000)
    y = from_softmax(own[row], 0.7 * rng.standard_normal((60, 800)), rng.standard_normal(60), rng)
    new = row >= 600
    return of_parts(own[row[~new]], y[~new], own[row[new]], y[new])


@problem("few-a-class", "choose")
def few_a_class(data: Path, seed: int) -> Problem:
    """2,500 classes of two to four rows, each class with words of its own among common ones: separable."""
    return _few_a_class(rng_of(seed, "rare"), 2_500, 5_000)


@problem("few-a-class-8000", "report")
def few_a_class_large(data: Path, seed: int) -> Problem:
    return _few_a_class(rng_of(seed, "rarer"), 8_000, 20_000)


def _few_a_class(rng: np.random.Generator, K: int, D: int) -> Problem:
    y = np.concatenate([np.repeat(np.arange(K), rng.integers(2, 5, K)), rng.integers(K, size=K)])
    own = rng.integers(D, size=(K, 3))
    common = sparse_rows(rng, len(y), D, rng.integers(4, 9, len(y)))
    kept = rng.random((len(y), 3)) < 0.8
    rows = np.repeat(np.arange(len(y)), 3)[kept.ravel()]
    X = (common + sp.csr_matrix((np.ones(len(rows)), (rows, own[y].ravel()[kept.ravel()])), common.shape)).tocsr()
    X = sp.diags_array(1.0 / np.sqrt(np.asarray(X.multiply(X).sum(1)).ravel())) @ X
    X = sp.csr_matrix(X, dtype=np.float32)
    return of_parts(X[:-K], y[:-K], X[-K:], y[-K:])


@problem("zipf-50000", "report")
def zipf(data: Path, seed: int) -> Problem:
    """50,000 classes with Zipf frequencies, about half of them seen; 10,000 features, of which a class prefers some."""
    rng, K, D, N = rng_of(seed, "zipf"), 50_000, 10_000, 110_000
    p = (np.arange(K) + 5.0) ** -1.0
    y = np.searchsorted(np.cumsum(p / p.sum()), rng.random(N)).clip(max=K - 1)
    own = rng.integers(D, size=(K, 50))
    noise = rng.integers(D // 100, size=(N, 8))
    said = own[y[:, None], rng.integers(50, size=(N, 6))]
    tokens = np.sort(np.concatenate([noise, said], axis=1), axis=1).astype(np.int32)
    X = sp.csr_matrix((np.ones(tokens.size, np.float32), tokens.ravel(), np.arange(0, tokens.size + 1, 14)), (N, D))
    X.sum_duplicates()
    return of_parts(X[:-6_000], y[:-6_000], X[-6_000:], y[-6_000:])


@problem("million-columns", "report")
def million_columns(data: Path, seed: int) -> Problem:
    """10^6 sparse features with Zipf frequencies, 12 classes."""
    rng = rng_of(seed, "columns")
    X = sparse_rows(rng, 45_000, 1_000_000, rng.integers(10, 60, 45_000), decay=0.9)
    y = from_softmax(X, 0.5 * rng.standard_normal((12, 1_000_000)), np.zeros(12), rng)
    return of_parts(X[:-5_000], y[:-5_000], X[-5_000:], y[-5_000:])


@problem("million-rows", "report")
def million_rows(data: Path, seed: int) -> Problem:
    rng = rng_of(seed, "million")
    X = (rng.standard_normal((1_020_000, 20)) @ rng.standard_normal((20, 20))).astype(np.float32)
    y = from_softmax(X, 0.2 * rng.standard_normal((3, 20)), np.array([0.0, 1.0, -1.0]), rng)
    return of_parts(X[:-20_000], y[:-20_000], X[-20_000:], y[-20_000:])


@problem("counts-8", "choose")
def counts(data: Path, seed: int) -> Problem:
    rng = rng_of(seed, "counts")
    X = rng.poisson(np.exp(rng.standard_normal(50)), (1_400, 50)).astype(np.float64)
    y = from_softmax(X, 0.25 * rng.standard_normal((8, 50)), np.zeros(8), rng)
    return split(X, y, rng)


@cache
def by_name() -> dict[str, Entry]:
    return {entry.name: entry for entry in ZOO}
