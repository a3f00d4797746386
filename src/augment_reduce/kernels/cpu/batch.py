"""The minibatch as the kernels like it: its rows side by side, in the weights' dtype, with 32-bit indices.

Loading copies B rows into scratch, a C-th of the work that follows, and is the only code that sees the
caller's dtypes, orders and memory maps.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from ..cache import cached_njit
from ..rows import DenseRows, MappedDenseRows, MappedRows, Rows, SparseRows, check_indptr
from .lanes import prefetch
from .products import is_full
from .types import OPTIONS, Array, Csr
from .work import WORK, OutOfRange, all_below, equal

DENSE_FROM = 0.1  # share of non-zeros from which a vectorised pass over all of D beats one over the non-zeros
LINE = 16  # float32 numbers in a cache line
AHEAD = 6  # rows sent for before they are read
FEW_FEATURES = 4096  # so many accumulators fit in the first cache: no need to number the touched ones


@dataclass
class Batch:
    source: weakref.ref
    rows: Array
    dtype: np.dtype
    csr: Csr | None = None
    dense: Array | None = None  # (B, D)
    full: bool = False  # dense, and for classes shared by all rows: whether that is better than CSR for these, too

    @property
    def empty(self) -> bool:
        """Whether the rows have no non-zero at all."""
        return self.csr is not None and not len(self.csr.value)


@cached_njit(**OPTIONS)
def _count(indptr: Array, n_entries: int, rows: Array) -> int:
    """Entries of the rows; -1 if there is no such row, -2 if one does not lie within the entries."""
    n = 0
    for b in range(rows.shape[0]):
        if rows[b] < 0 or rows[b] + 1 >= indptr.shape[0]:
            return -1
        begin, end = indptr[rows[b]], indptr[rows[b] + 1]
        if begin < 0 or end < begin or end > n_entries:
            return -2
        n += end - begin
    return n


@njit(**OPTIONS)
def _send_for(indptr: Array, indices: Array, values: Array, rows: Array, b: int) -> None:
    """Ask for row b of the minibatch: rows lie far apart, so the hardware does not fetch ahead by itself."""
    if b < rows.shape[0]:
        for q in range(indptr[rows[b]], indptr[rows[b] + 1], LINE):
            prefetch(indices, q)
            prefetch(values, q)


@cached_njit(**OPTIONS)
def _load_csr(
    indptr: Array, indices: Array, values: Array, rows: Array, out_ptr: Array, out_index: Array, out_value: Array
) -> Any:
    """Copy the rows, without explicit zeros; returns the largest feature index seen (negative ones wrap)."""
    n = 0
    worst = np.uint64(0)
    out_ptr[0] = 0
    for b in range(rows.shape[0]):
        _send_for(indptr, indices, values, rows, b + AHEAD)
        lo, hi = indptr[rows[b]], indptr[rows[b] + 1]
        m = hi - lo
        source, numbers = indices[lo:hi], values[lo:hi]
        index, value = out_index[n : n + m], out_value[n : n + m]
        zeros = 0
        for q in range(m):
            worst = max(worst, np.uint64(source[q]))
            index[q] = source[q]
        for q in range(m):
            value[q] = numbers[q]
            zeros += value[q] == 0
        if zeros > 0:
            kept = 0
            for q in range(m):
                index[kept], value[kept] = index[q], value[q]
                kept += value[q] != 0
        n += m - zeros
        out_ptr[b + 1] = n
    return worst


@cached_njit(**OPTIONS)
def _load_nonzeros(x: Array, out_ptr: Array, out_index: Array, out_value: Array) -> None:
    """The non-zeros of dense rows."""
    n = np.uint64(0)
    out_ptr[0] = 0
    for b in range(x.shape[0]):
        for d in range(x.shape[1]):
            out_index[n] = d
            out_value[n] = x[b, d]
            n += np.uint64(x[b, d] != 0)
        out_ptr[b + 1] = n


@cached_njit(**OPTIONS)
def _touched(index: Array, number: Array, feature: Array) -> int:
    """Each touched feature once, and how many. `number` (D,) is zero before and after: an interrupt may follow."""
    n = 0
    for q in range(index.shape[0]):
        if number[index[q]] == 0:
            feature[n] = index[q]
            n += 1
            number[index[q]] = 1
    for u in range(n):
        number[feature[u]] = 0
    return n


@cached_njit(**OPTIONS)
def _number_features(index: Array, feature: Array, number: Array, slot: Array) -> None:
    """slot[q]: the place of index[q] among the features. `number` is zero before and after."""
    for u in range(feature.shape[0]):
        number[feature[u]] = u
    for q in range(index.shape[0]):
        slot[q] = number[index[q]]
    for u in range(feature.shape[0]):
        number[feature[u]] = 0


@cached_njit(**OPTIONS)
def _load_dense(indptr: Array, indices: Array, values: Array, rows: Array, x: Array) -> Any:
    """Sparse rows as dense ones; returns the largest feature index seen, and stops at one too large."""
    worst = np.uint64(0)
    for b in range(rows.shape[0]):
        _send_for(indptr, indices, values, rows, b + AHEAD)
        lo, hi = indptr[rows[b]], indptr[rows[b] + 1]
        index, value, row = indices[lo:hi], values[lo:hi], x[b]
        for q in range(hi - lo):
            worst = max(worst, np.uint64(index[q]))
        if worst >= x.shape[1]:
            break
        row[:] = 0
        for q in range(hi - lo):
            row[np.uint32(index[q])] = value[q]
    return worst


@cached_njit(**OPTIONS)
def _divide(index: Array, value: Array, scale: Array) -> None:
    """The values in units of their features."""
    for q in range(index.shape[0]):
        value[q] = value[q] / scale[index[q]]


def read_only(a: Array) -> Array:
    """So that arrays which may and may not be written to share one compiled signature."""
    view = np.asarray(a).view()
    view.flags.writeable = False
    return view


def check_rows(rows: Array, n_rows: int, found: bool) -> None:
    if not found:
        raise OutOfRange(f"Expected rows in [0, {n_rows}), found {rows.min()} to {rows.max()}.")


def _check_features(worst: int, n_features: int) -> None:
    if worst >= n_features:
        raise _no_such_feature(worst, n_features)


def _no_such_feature(found: int, n_features: int) -> ValueError:
    return ValueError(
        f"Expected feature indices in [0, n_features={n_features}), found {found}. "
        "Check the shape that the CSR matrix was made with."
    )


def check_features(X: SparseRows) -> None:
    """Look at every index of X: for those who go through all rows, and have no minibatch to look at."""
    if isinstance(X, MappedRows):  # looked through when it was mapped
        return
    if not all_below(np.asarray(X.indices), X.n_features):
        lowest, highest = int(X.indices.min()), int(X.indices.max())
        raise _no_such_feature(lowest if lowest < 0 else highest, X.n_features)


def dense_enough(n_nonzero: int, B: int, D: int, n_classes: int) -> bool:
    """Whether B sparse rows are better gone through as a (B, D) array; not for a class or two, which read it once."""
    return n_classes > 2 and n_nonzero > DENSE_FROM * B * D


def worth_numbering(n_nonzero: float, D: int) -> bool:
    """Whether accumulators for the touched features alone are worth numbering these."""
    return max(FEW_FEATURES, n_nonzero // 2) < D


def _load_sparse(X: SparseRows, rows: Array, dtype: np.dtype, n_classes: int) -> tuple[Csr | None, Array | None]:
    """The rows as a (B, D) array if they fill enough of it, as CSR otherwise."""
    scale = None
    if isinstance(X, MappedRows) and X.stored_for(dtype):
        scale = X.scale
    elif isinstance(X, MappedRows):
        X, rows = X.loaded(rows)
    B, D, indptr = len(rows), X.n_features, read_only(X.indptr)
    indices, values = read_only(X.indices), read_only(X.values)
    size = _count(indptr, min(len(indices), len(values)), rows)
    check_rows(rows, X.n_rows, size != -1)
    if size < 0:
        check_indptr(X.indptr, min(len(indices), len(values)))
    if dense_enough(size, B, D, n_classes):
        x = WORK.array("dense", B * D, dtype).reshape(B, D)
        _check_features(_load_dense(indptr, indices, values, rows, x), D)
        if scale is not None:
            x /= scale
        return None, x
    ptr, index, value = (
        WORK.array(*a) for a in (("indptr", B + 1, np.int64), ("index", size, np.uint32), ("value", size, dtype))
    )
    worst = _load_csr(indptr, indices, values, rows, ptr, index, value)
    if size:
        _check_features(worst, D)
    if scale is not None:
        _divide(index[: int(ptr[-1])], value, read_only(scale))
    return _numbered(ptr, index, value, D), None


def _csr_of_dense(x: Array) -> Csr:
    B, D = x.shape
    ptr, index = WORK.array("indptr", B + 1, np.int64), WORK.array("index", B * D + 1, np.uint32)
    value = WORK.array("value", B * D + 1, x.dtype)
    _load_nonzeros(x, ptr, index, value)
    return _numbered(ptr, index, value, D)


def _numbered(ptr: Array, index: Array, value: Array, D: int) -> Csr:
    """Number the touched features where D is large, so that accumulators are no longer than needed."""
    nnz = int(ptr[-1])
    index, value = index[:nnz], value[:nnz]
    if not worth_numbering(nnz, D):
        return Csr(ptr[:-1], ptr[1:], index, index, value, WORK.array("no_index", 0, np.uint32))
    slot, feature = WORK.array("slot", nnz, np.uint32), WORK.array("feature", nnz, np.uint32)
    number = WORK.array("number", D, np.uint32)
    feature = feature[: _touched(index, number, feature)]
    feature.sort()  # whoever reads a weight row by them goes through memory in one direction
    _number_features(index, feature, number, slot)
    return Csr(ptr[:-1], ptr[1:], index, slot, value, feature)


def in_place(X: Rows, rows: Array, dtype: np.dtype) -> Array | None:
    """All of X as the kernels can read it where it lies, for rows that are read once; None where they cannot."""
    if isinstance(X, MappedDenseRows) and X.scale is not None:
        return None
    if not isinstance(X, DenseRows) or X.values.dtype != dtype or not X.values.flags.c_contiguous:
        return None
    check_rows(rows, X.n_rows, all_below(rows, X.n_rows))
    return read_only(X.values)


def _dense(X: DenseRows, rows: Array, dtype: np.dtype) -> Array:
    check_rows(rows, X.n_rows, all_below(rows, X.n_rows))
    x = WORK.array("dense", len(rows) * X.n_features, dtype).reshape(len(rows), X.n_features)
    if isinstance(X, MappedDenseRows):
        x[...] = X.block(rows)
    elif X.values.dtype == dtype:
        np.take(np.asarray(X.values), rows, axis=0, out=x, mode="clip")
    else:
        x[...] = X.values[rows]
    return x


def load(X: Rows, rows: Array, dtype: np.dtype, *, n_classes: int) -> Batch:
    """The minibatch, for `n_classes` classes a row (0: classes shared by all rows).

    What the scores loaded, the push after them finds again if X and the rows are the same.
    """
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    batch: Batch | None = WORK.batch
    same = batch is not None and batch.source() is X and batch.dtype == dtype and equal(batch.rows, rows)
    if batch is None or not same:
        WORK.batch = None  # should loading fail half way
        batch = Batch(weakref.ref(X), rows.copy(), np.dtype(dtype))
    if isinstance(X, DenseRows):
        if batch.dense is None:
            batch.dense = _dense(X, rows, dtype)
        if n_classes == 0 and batch.csr is None and not batch.full:
            batch.full = is_full(batch.dense)
            batch.csr = None if batch.full else _csr_of_dense(batch.dense)
    elif batch.csr is None and (n_classes == 0 or batch.dense is None):
        csr, dense = _load_sparse(X, rows, dtype, n_classes)
        batch.csr, batch.dense = csr or batch.csr, dense if dense is not None else batch.dense
    WORK.batch = batch
    return batch
