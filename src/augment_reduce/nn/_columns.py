"""The classes that each row is scored against: the drawn ones, and the labels of the other rows of the minibatch.

The labels' weight rows are read and updated anyway. If the labels of a minibatch are independent draws from the class
frequencies f, class k occurs E_S[k] times in expectation among the |S| drawn classes and n_b f_k times among the labels
of the n_b other rows of row b. Each occurrence has the weight (the balance heuristic of Veach and Guibas 1995)

    omega_bk = 1 / (E_S[k] + n_b f_k),        E[sum over columns k != y_b of omega_bk g_k] = sum_{k != y_b} g_k.

Rows of one group (tokens of one sequence) are not independent: the labels of a group are masked for its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DRAWN, LABEL, UNUSED = 0, 1, 2  # kinds of columns
MOST_LABELS = 1024  # labels that are added; more do not improve the estimate


class Columns(NamedTuple):
    """C columns of the (B, C) scores: S drawn classes, then M labels.

    `log_weight` (C,) is log omega without labels; with labels it is computed from `expected` E_S and `share` f (C,),
    and `n` (B,). `kind` and `group` (C,) and the rows' groups `row_group` (B,) determine which columns are masked for a
    row.
    """

    classes: Tensor
    log_weight: Tensor
    expected: Tensor | None = None
    share: Tensor | None = None
    kind: Tensor | None = None
    group: Tensor | None = None
    row_group: Tensor | None = None
    n: Tensor | None = None

    def of_rows(self, part: slice, label: Tensor) -> tuple[Tensor, Tensor]:
        """(log_weight (C,) or (rows, C), mask (rows, C): True where a column is masked for a row), of the rows in
        `part`."""
        hidden_from = label[part, None] == self.classes
        if self.expected is None:
            return self.log_weight, hidden_from
        assert self.share is not None
        assert self.kind is not None
        assert self.group is not None
        assert self.row_group is not None
        assert self.n is not None
        same = (self.row_group[part, None] == self.group) & (self.kind == LABEL)
        hidden_from |= same | (self.kind == UNUSED)
        expected = self.expected + self.n[part, None] * self.share
        return -torch.log(expected), hidden_from

    def at(self, which: Tensor) -> Columns:
        """The columns `which`."""
        given = (self.expected, self.share, self.kind, self.group)
        expected, share, kind, group = (None if x is None else x[which] for x in given)
        log_weight = self.log_weight[which] if self.expected is None else self.log_weight  # else it is computed from it
        return Columns(self.classes[which], log_weight, expected, share, kind, group, self.row_group, self.n)


def label_rows_of(n_rows: int, device: torch.device) -> Tensor | None:
    """The rows whose labels are added, evenly spaced; None: all."""
    if n_rows <= MOST_LABELS:
        return None
    return (torch.arange(MOST_LABELS, device=device) * n_rows) // MOST_LABELS


def with_labels(
    classes: Tensor,
    label: Tensor,
    usable: Tensor,
    group: Tensor | None,
    expected: Tensor,
    share: Tensor,
    source: Tensor | None,
    own: slice = slice(None),
) -> Columns:
    """Columns of the drawn `classes` (S,) and of the labels of the rows `source` (None: all) that are `usable` (B,).

    `own` selects the rows to be scored. `expected` and `share` are those of the S + M classes. Does not synchronise
    with the device.
    """
    S, group = len(classes), groups_of(group, len(label), label.device)
    from_label, from_group, from_usable = (x if source is None else x[source] for x in (label, group, usable))
    kind = torch.cat([torch.full_like(classes, DRAWN), torch.where(from_usable, LABEL, UNUSED)])
    columns = torch.cat([classes, from_label])
    n = _others(group[own], from_group, from_usable).to(expected.dtype)
    of_column = torch.cat([torch.full_like(classes, -1), from_group])
    return Columns(columns, expected.new_zeros(S), expected, share, kind, of_column, group[own], n)


def groups_of(group: Tensor | None, n_rows: int, device: torch.device, first_row: int = 0) -> Tensor:
    """(B,) the groups of a minibatch's rows; None: each row is a group."""
    return torch.arange(first_row, first_row + n_rows, device=device) if group is None else group


def _others(group: Tensor, from_group: Tensor, usable: Tensor) -> Tensor:
    """(B,) the number of usable label rows of other groups, for each row."""
    ordered = torch.sort(torch.where(usable, from_group, torch.iinfo(torch.int64).max)).values
    same = torch.searchsorted(ordered, group, right=True) - torch.searchsorted(ordered, group)
    return usable.sum() - same
