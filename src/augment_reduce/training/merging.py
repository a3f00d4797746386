"""Merge duplicate rows with equal labels into one row of their total weight, in an order independent of theirs.

For direct fits: row weights, repeated rows and any order of rows then give the same problem, bit for bit.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from ..kernels.rows import DenseRows, SparseRows
from ..support.seeds import mix
from .fitted import TrainingRows


def merged(rows: TrainingRows) -> TrainingRows:
    active = rows.active()
    weight = np.ones(len(active)) if rows.weight is None else rows.weight[active].astype(np.float64)
    codes, X = rows.codes[active], rows.X
    direction = np.random.Generator(np.random.PCG64(mix(0, 24, 0))).standard_normal(X.n_features)
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(X, DenseRows):
            values = X.values[active]
            place = np.einsum("nd,d->n", values.astype(np.float64), direction)
            order = np.lexsort((place, codes))
            values, differs = values[order], np.zeros(max(0, len(active) - 1), dtype=bool)
            for first in range(0, len(differs), 4096):
                part = slice(first, min(first + 4096, len(differs)))
                after = slice(part.start + 1, part.stop + 1)
                differs[part] = (values[after] != values[part]).any(1)
        else:
            matrix = sp.csr_matrix((X.values, X.indices, X.indptr), shape=(X.n_rows, X.n_features), copy=False)[active]
            order = np.lexsort((matrix @ direction, codes))
            matrix = matrix[order]
            differs = np.diff((matrix[1:] != matrix[:-1]).indptr) > 0
    codes, weight = codes[order], weight[order]
    begins = np.flatnonzero(np.concatenate([[True], differs | (np.diff(codes) != 0)]))
    if isinstance(X, DenseRows):
        own: DenseRows | SparseRows = DenseRows(values[begins])
    else:
        kept = matrix[begins]
        own = SparseRows(kept.indptr, kept.indices, kept.data, X.n_features)
    return TrainingRows(own, codes[begins], np.add.reduceat(weight, begins))
