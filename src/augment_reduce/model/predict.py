"""Prediction over many rows, in blocks: N x K arrays are allocated only for results of that size.

The input is a function that scores a block of rows, `scores_of(start, stop) -> psi (stop - start, K)`, for dense or
sparse rows or the output of a network; with sharded classes it scores the classes of this rank, and `columns` combines
them with those of other ranks. Probabilities are computed by the noise (quadrature.py): eq. (1) for softmax, eq. (5)
for the others.

Blocks are distributed over `threads.get_num_threads()` threads. Their sizes depend on the numbers of rows and classes
only, and so do the results.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..kernels.threads import for_each, get_num_threads
from . import quadrature
from .noise import Noise

ScoresOf = Callable[[int, int], Tensor]

BUDGET_BYTES = 32 << 20
SMALL_BLOCK, BLOCKS = (
    1 << 18,
    16,
)  # least (row, class) pairs of a block; number of blocks
ARRAYS = 4  # (rows, classes) arrays of float64 at once: scores, a copy, the result, one temporary


def block_rows(n_classes: int, n_nodes: int = ARRAYS, budget_bytes: int = BUDGET_BYTES) -> int:
    """The number of rows that fit the budget with `n_nodes` float64 numbers for each (row, class); at least one."""
    return max(1, budget_bytes // (8 * max(1, n_classes) * max(1, n_nodes)))


def row_blocks(n_rows: int, n_classes: int, budget_bytes: int = BUDGET_BYTES) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive blocks that cover all rows: limited by the budget, and at least BLOCKS of them if
    they are large enough."""
    few = max(-(-SMALL_BLOCK // max(1, n_classes)), -(-n_rows // BLOCKS))
    step = min(few, block_rows(n_classes, budget_bytes=budget_bytes))
    return ((start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def bytes_needed(n_rows: int, n_classes: int, numbers: int) -> int:
    """Bytes of a result with `numbers` numbers a row, and of the blocks in memory."""
    rows = max([stop - start for start, stop in row_blocks(n_rows, n_classes)], default=0)
    return 8 * (n_rows * numbers + get_num_threads() * ARRAYS * rows * n_classes)


class Columns:
    """Operations over the columns of scores, here all classes; `ColumnsOverRanks` if the classes are sharded."""

    def __init__(self, n_classes: int) -> None:
        self.n_classes = self.n_here = n_classes

    def first_not_finite(self, psi: Tensor) -> int | None:
        """The first row with NaN or infinity; None if there is none."""
        return None if psi.isfinite().all() else int(psi.isfinite().all(1).logical_not().nonzero()[0])

    def highest(self, psi: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(scores, classes) (B, k) of the k highest, best first, ties to the lowest class."""
        classes = highest(psi, k)
        return psi.gather(1, classes), classes

    def log_likelihood(self, noise: Noise, psi: Tensor, labels: Tensor) -> Tensor:
        return quadrature.log_likelihood(noise, psi, labels)

    def log_proba_of(self, noise: Noise, psi: Tensor, classes: Tensor, scores: Tensor) -> Tensor:
        """log p of these classes (B, C), given their scores."""
        return quadrature.log_proba_of(noise, psi, classes)


def _checked_scores(scores_of: ScoresOf, start: int, stop: int, columns: Columns) -> Tensor:
    psi = scores_of(start, stop)
    if psi.shape != (stop - start, columns.n_here):
        raise ValueError(
            f"Expected scores_of({start}, {stop}) to give shape {(stop - start, columns.n_here)}, one row each and one "
            f"column a class, but found {tuple(psi.shape)}."
        )
    first = columns.first_not_finite(psi)
    if first is not None:
        raise ValueError(
            f"Expected finite scores, but those of row {start + first} hold NaN or infinity: its features do, or the "
            "weights have diverged in training. Check that row; train with a lower learning rate or with a prior."
        )
    return psi


def _for_blocks(
    work: Callable[[slice, Tensor], None], scores_of: ScoresOf, n_rows: int, columns: Columns, budget_bytes: int
) -> None:
    """work(rows, psi) for every block, in inference mode, in which the noise's functions are compiled."""

    def block(ends: tuple[int, int]) -> None:
        with torch.inference_mode():
            work(slice(*ends), _checked_scores(scores_of, *ends, columns))

    for_each(block, row_blocks(n_rows, columns.n_classes, budget_bytes))


def _check_labels(labels: Tensor, n_classes: int) -> None:
    bad = ((labels < 0) | (labels >= n_classes)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"Expected labels in [0, n_classes={n_classes}), but {len(bad)} of {len(labels)} rows are outside; first "
            f"at row {row}: y={int(labels[row])}. Labels are 0-based positions of classes; encode them first."
        )


def log_likelihood(
    noise: Noise,
    scores_of: ScoresOf,
    labels: Tensor,
    n_classes: int | None = None,
    *,
    columns: Columns | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """log p(y_n | psi_n) of every row, (N,) float64; exact for every model (eq. 5; softmax: eq. 1), not averaged.

    `n_classes` is determined from the first row if not given. Labels are positions 0 .. K-1.
    """
    out = torch.empty(len(labels), dtype=torch.float64)
    if n_classes is None:
        n_classes = scores_of(0, 1).shape[1] if len(labels) else 1
    _check_labels(labels, n_classes)
    of = columns or Columns(n_classes)

    def work(rows: slice, psi: Tensor) -> None:
        out[rows] = of.log_likelihood(noise, psi, labels[rows].to(psi.device, torch.int64))

    _for_blocks(work, scores_of, len(labels), of, budget_bytes)
    return out.clamp_(max=0.0)  # rounding may give +1e-14 for a certain label


def log_likelihood_importance(
    noise: Noise,
    scores_of: ScoresOf,
    labels: Tensor,
    n_classes: int,
    *,
    generator: torch.Generator,
    n_samples: int = 1000,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """The paper's estimate of `log_likelihood` from draws of N(5, 5^2) (sec. 4), without its clipping, for
    comparison."""
    _check_labels(labels, n_classes)
    out = torch.empty(len(labels), dtype=torch.float64)
    for start, stop in row_blocks(len(labels), n_classes, budget_bytes):  # in order: all draw from one generator
        psi, rows = _checked_scores(scores_of, start, stop, Columns(n_classes)), slice(start, stop)
        y = labels[rows].to(psi.device, torch.int64)
        out[rows] = quadrature.log_likelihood_importance(noise, psi, y, generator=generator, n_samples=n_samples)
    return out


def log_proba(
    noise: Noise,
    scores_of: ScoresOf,
    n_rows: int,
    n_classes: int,
    out_dtype: torch.dtype = torch.float64,
    *,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """log p(k | psi_n) of every row and class, (N, K): eq. (5) with one grid a row, O(K J), and not
    renormalised; accuracy as in `quadrature.log_proba`."""
    out = torch.empty(n_rows, n_classes, dtype=out_dtype)

    def work(rows: slice, psi: Tensor) -> None:
        out[rows] = quadrature.log_proba(noise, psi).clamp_(max=0.0).to(out_dtype)

    _for_blocks(work, scores_of, n_rows, Columns(n_classes), budget_bytes)
    return out


def proba(
    noise: Noise,
    scores_of: ScoresOf,
    n_rows: int,
    n_classes: int,
    out_dtype: torch.dtype = torch.float64,
    *,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """e^`log_proba`, (N, K), rounded to `out_dtype` last."""
    out = torch.empty(n_rows, n_classes, dtype=out_dtype)

    def work(rows: slice, psi: Tensor) -> None:
        out[rows] = quadrature.log_proba(noise, psi).clamp_(max=0.0).exp_().to(out_dtype)

    _for_blocks(work, scores_of, n_rows, Columns(n_classes), budget_bytes)
    return out


def scores(
    scores_of: ScoresOf,
    n_rows: int,
    n_classes: int,
    out_dtype: torch.dtype | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """psi of every row, (N, K), in the dtype of the computation, or in `out_dtype`, clipped to its largest finite
    numbers."""
    if out_dtype is None:
        out_dtype = scores_of(0, 1).dtype if n_rows else torch.get_default_dtype()
    out, most = torch.empty(n_rows, n_classes, dtype=out_dtype), torch.finfo(out_dtype).max

    def work(rows: slice, psi: Tensor) -> None:
        out[rows] = psi if psi.dtype == out_dtype else psi.clamp(-most, most).to(out_dtype)

    _for_blocks(work, scores_of, n_rows, Columns(n_classes), budget_bytes)
    return out


def argmax(
    scores_of: ScoresOf, n_rows: int, n_classes: int, *, columns: Columns | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:  # fmt: skip
    """The most probable class of every row, (N,) int64: that of the highest score (see `top_k`), ties to the lowest."""
    out, of = torch.empty(n_rows, dtype=torch.int64), columns or Columns(n_classes)

    def work(rows: slice, psi: Tensor) -> None:
        out[rows] = of.highest(psi, 1)[1][:, 0]

    _for_blocks(work, scores_of, n_rows, of, budget_bytes)
    return out


def top_k(
    noise: Noise,
    scores_of: ScoresOf,
    n_rows: int,
    n_classes: int,
    k: int,
    *,
    columns: Columns | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> tuple[Tensor, Tensor]:
    """The k most probable classes of every row, best first, and their probabilities: (N, k) int64, (N, k) float64.

    The classes are those of the highest scores, since under any noise that is the same for all classes the order of
    scores is the order of probabilities. For if psi_a >= psi_b, exchange eps_a and eps_b in any draw of the noise
    that lets b win: then a wins with a utility psi_a + eps_b at least as high, over an opponent psi_b + eps_a that is
    no stronger than the a it beat, and the exchange keeps the probability of the draw. So p_a >= p_b; equal scores
    have equal probabilities, and go by the lower class. Probabilities are computed for these k alone, exactly.
    """
    if not 1 <= k <= n_classes:
        raise ValueError(f"Expected k between 1 and the number of classes, {n_classes}, but found {k}.")
    classes = torch.empty(n_rows, k, dtype=torch.int64)
    probabilities = torch.empty(n_rows, k, dtype=torch.float64)
    of = columns or Columns(n_classes)

    def work(rows: slice, psi: Tensor) -> None:
        scores, classes[rows] = of.highest(psi, k)
        probabilities[rows] = of.log_proba_of(noise, psi, classes[rows], scores).exp_().clamp_(max=1.0)

    _for_blocks(work, scores_of, n_rows, of, budget_bytes)
    return classes, probabilities


def highest(psi: Tensor, k: int) -> Tensor:
    """Columns of the k highest scores of each row, (B, k), best first, ties to the lower column; NaN counts as -inf.

    O(K), without sorting K scores. torch.max finds the first of equal scores; torch.topk breaks ties arbitrarily. So
    its columns are sorted; and in rows whose k-th score equals the next one the columns of that score are selected
    again. Both treat NaN as the largest. Under a compiler, without data-dependent branches, it is a stable sort.
    """
    if torch.compiler.is_compiling():
        return (
            psi.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
            .sort(dim=1, descending=True, stable=True)
            .indices[:, :k]
        )
    found = psi.max(dim=1, keepdim=True) if k == 1 else psi.topk(min(k + 1, psi.shape[1]), dim=1)
    if found.values[:, 0].isnan().any():
        return highest(psi.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), k)
    if k == 1:
        return found.indices
    columns = found.indices[:, :k].sort(dim=1).values
    tied = (found.values[:, k - 1] == found.values[:, -1]).nonzero()[:, 0] if k < psi.shape[1] else columns[:0, 0]
    if len(tied):
        columns[tied] = _lowest_columns(psi[tied], found.values[tied, k - 1, None], k)
    order = psi.gather(1, columns).sort(dim=1, descending=True, stable=True).indices
    return columns.gather(1, order)


def _lowest_columns(psi: Tensor, last: Tensor, k: int) -> Tensor:
    """(B, k) ascending: the columns of scores above the k-th, `last` (B, 1), and the first of those that equal it."""
    above, level = psi > last, psi == last
    chosen = above | (level & (level.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(len(psi), k)  # by row, then by column


def merge_highest(best: tuple[Tensor, Tensor] | None, psi: Tensor, first: int, k: int) -> tuple[Tensor, Tensor]:
    """(scores, classes) of the k highest so far, best first: those of earlier blocks of classes, and of this one.

    `psi` (B, n) are the scores of the classes first .. first + n - 1; blocks come in the order of their classes. So
    among equal scores an earlier column of the concatenated lists is a lower class, and ties are broken as in
    `highest`.
    """
    columns = highest(psi, min(k, psi.shape[1]))
    scores, classes = psi.gather(1, columns), columns + first
    if best is None:
        return scores, classes
    scores, classes = torch.cat([best[0], scores], dim=1), torch.cat([best[1], classes], dim=1)
    place = highest(scores, min(k, scores.shape[1]))
    return scores.gather(1, place), classes.gather(1, place)
