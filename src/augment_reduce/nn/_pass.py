"""Scoring of a step's rows, at once or in chunks, in the forward pass and, in chunks, in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import _hash
from ._columns import Columns, groups_of, label_rows_of, with_labels
from ._local import REFINE_NODES
from ._plain import LARGEST, Objective, objective, scores_of
from ._smoothing import smoothed, with_z_loss
from ._targets import labels_and_weights

if TYPE_CHECKING:
    from ._step import Step

WHOLE = 1 << 24  # most scores of a minibatch kept for the backward pass: 64 MB in float32
CHUNK = 1 << 20  # scores of a chunk, if they are not kept


class Rescored(NamedTuple):
    """Inputs for scoring chunks again in the backward pass, in addition to `Saved`; stored in the step."""

    run: Pass
    seen: Tensor


class Scored(NamedTuple):
    """A chunk of rows after their local step."""

    hidden: Tensor
    label_rows: Tensor
    psi_y: Tensor
    predicted: Tensor
    used: Tensor
    usable: Tensor
    found: Objective


class Pass:
    """The passes of one step over its rows: shared inputs, and the scoring of one chunk."""

    def __init__(self, step: Step, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.step, self.hidden = step, hidden
        self.place = step.place(weight, bias)
        self.dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        self.label, self.row_weight = labels_and_weights(
            step.target, step.sample_weight, step.ignore_index, self.place.n_classes, step.tally, self.dtype
        )
        self.place.begin(self.label)
        self.counter = step.counter[0].clone()  # of this step, for its backward pass
        self.columns, self.rows, self.row_bias = self._columns()
        if step.class_mean is not None:  # the last row, of no class
            self.rows = torch.cat([self.rows, step.class_mean.row.to(self.dtype)[None]])
        self.second: Columns | None = None
        if step.local.mode == "fresh" and step.parts is None:
            self.second = self.place.kept(Columns(*step.draw(_hash.SECOND)))
            self.second_rows = self.place.class_rows(self.second.classes, self.dtype)

    def _columns(self) -> tuple[Columns, Tensor, Tensor | None]:
        step, drawn = self.step, self.step.draw(_hash.MAIN)
        columns = Columns(drawn.classes, drawn.log_weight)
        if step.in_batch:
            assert step.sampler is not None
            group = groups_of(step.group, len(self.label), self.label.device, self.place.first_row)
            label, usable, group, own = self.place.labels(self.label, self._label_is_usable(), group)
            source = label_rows_of(len(label), label.device)
            classes = torch.cat([drawn.classes, label if source is None else label[source]])
            expected, share = step.sampler.expected(classes), step.sampler.share_of(classes)
            columns = with_labels(drawn.classes, label, usable, group, expected, share, source, own)
        self.drawn, self.n_columns = drawn, len(columns.classes)
        columns = self.place.kept(columns)
        return columns, *self.place.class_rows(columns.classes, self.dtype)

    def _label_is_usable(self) -> Tensor:
        """Rows that count, with finite hidden values and finite weights of the label."""
        good = [
            (self.hidden[part].abs() < LARGEST).all(dim=1) & self.place.have_finite_weights(self.label[part], part)
            for part in self._parts(len(self.label), 4 * self.hidden.shape[1])
        ]
        return (self.row_weight != 0) & (torch.cat(good) if good else self.row_weight != 0)

    def parts(self) -> Iterator[slice]:
        if self.step.whole:
            return iter([slice(0, len(self.hidden))])
        return self._parts(len(self.hidden), max(self.n_columns, 4 * self.hidden.shape[1]))

    def _parts(self, n: int, width: int) -> Iterator[slice]:
        size = max(1, n) if n * width <= WHOLE else max(1, CHUNK // width)
        return (slice(start, min(start + size, n)) for start in range(0, max(1, n), size))

    def scored(self, part: slice, used: Tensor | None = None) -> Scored:
        """psi of these rows, their q(v) (`used`, if known), and the bound with its gradient by psi."""
        step = self.step
        h = self.hidden[part].to(self.dtype)
        y, row_weight = self.label[part], self.row_weight[part]
        psi_y, label_rows = self.place.label_scores(h, y, part)
        usable = (h.abs() < LARGEST).all(dim=1) & (psi_y.abs() < LARGEST)  # False for NaN
        if h.device.type != "cpu" or not bool(usable.all()):
            h, psi_y = torch.where(usable[:, None], h, 0.0), torch.where(usable, psi_y, 0.0)
            label_rows = torch.where(usable[:, None], label_rows, 0.0)
        predicted = step.local.predict(h, psi_y)
        if used is None:
            used = self._used(part, h, psi_y, predicted)
        nodes = step.local.nodes(used, step.key, self.counter, first_row=self.place.first_row + part.start)
        log_weight, hidden_from = self.columns.of_rows(part, self.label)
        psi = scores_of(h, self.rows[: len(self.columns.classes)], self.row_bias)
        kept = psi.clone() if step.label_smoothing else psi
        found = objective(step.noise, psi, psi_y, hidden_from, log_weight, nodes, step.floor, self.place.reduce)
        if step.z_loss:
            found = with_z_loss(found, used[0], step.floor, step.z_loss)
        if step.label_smoothing:
            assert step.class_mean is not None
            anchor = h @ self.rows[-1] + step.class_mean.bias.to(h.dtype)
            found = smoothed(
                found, kept, psi_y, hidden_from, log_weight, anchor, step.label_smoothing, self.place.n_classes
            )
        return Scored(h, label_rows, psi_y, predicted, used, usable & (row_weight != 0), found)

    def _used(self, part: slice, h: Tensor, psi_y: Tensor, predicted: Tensor) -> Tensor:
        step = self.step
        if step.parts is not None:
            return step.parts[:, part].to(h.dtype)
        used = step.local.recall(predicted, None if step.index is None else step.index[part])
        return used if self.second is None else self._refined(part, h, psi_y, used)

    def _refined(self, part: slice, h: Tensor, psi_y: Tensor, used: Tensor) -> Tensor:
        """q(v) corrected by the second sample, which is independent of the first, so the bound's estimate stays
        unbiased."""
        step, second = self.step, self.second
        assert second is not None
        psi = scores_of(h, *self.second_rows)
        n_nodes = max(REFINE_NODES, step.local.n_nodes)
        nodes = step.local.nodes(used, step.key, self.counter, n_nodes, first_row=self.place.first_row + part.start)
        own = self.label[part, None] == second.classes
        found = objective(step.noise, psi, psi_y, own, second.log_weight, nodes, None, self.place.reduce)
        return step.local.refine(used, found.slope, found.bend)
