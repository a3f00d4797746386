"""Classes sharded over ranks: the placements of a step, and its collectives.

    exchange    every rank                                                        sent by a rank, R ranks, B rows each
    "hidden"    scores all rows against its own classes; the sums over classes    2 (R - 1) B D numbers, and a few a row
                of `_plain.Reduced` are reduced over ranks
    "rows"      fetches the label rows of its own rows and all |S| sampled rows,  2 (B + |S|) D (R - 1) / R numbers
                and sends their gradients back

Both give the results of one process with the rows of all ranks, concatenated by rank, up to rounding: the draws of a
step do not depend on the ranks, and random numbers are indexed by the row's number in the whole minibatch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._version import __version__
from ..sharding import ClassShard, Ranks
from ..sharding.chunks import Chunks
from ._columns import Columns
from ._local import Report
from ._place import EveryClass
from ._plain import FAR, Reduced, RowGradient, class_rows, label_scores

if TYPE_CHECKING:
    from ._late import Unsettled
    from .head import AugmentReduceHead

EXCHANGES = ("hidden", "rows")
TRUNK_GRADIENTS = ("sum", "mean")
MOST_REF = 600.0  # limit of a log sum sent as float64


@dataclass
class Shards:
    """The layout of a head's classes over ranks. `exchange` None: the one that sends less."""

    ranks: Ranks
    layout: ClassShard
    softmax: bool
    exchange: str | None = None
    trunk_gradients: str | None = None
    sync: bool = False
    unsettled: Unsettled | None = None  # a step with pending sums (`_late.py`)
    last_loss: Tensor | None = None  # of the last step with completed sums

    def agreed_seeds(self, seeds: Tensor, take_first: bool) -> Tensor:
        every = self.ranks.gather(seeds.to(self.ranks.device()), "seeds").cpu()
        if take_first:
            return every[0]
        self.ranks.agree({"generator": seeds.tolist()}, "the state of a head's generator")
        return seeds

    def agree(self, head: AugmentReduceHead) -> None:
        """RankError on every rank unless the settings of all are equal."""
        sampler, optimizer = head.sampler, head.optimizer
        shares = "" if not sampler.knows_shares else hashlib.sha256(sampler.share.cpu().numpy().tobytes()).hexdigest()
        facts = {
            "n_classes": head.n_classes, "in_features": head.in_features, "model": head.noise.name,
            "n_sampled_classes": sampler.n_sampled, "class_sampling": sampler.name, "class_counts": shares[:12],
            "in_batch": head.in_batch, "local": head.local.mode, "n_nodes": head.local.n_nodes, "floor": head.floor,
            "bias": head.bias is not None, "optimizer": None if optimizer is None else repr(optimizer),
            "dtype": str(head.weight.dtype), "reduction": head.reduction, "ignore_index": head.ignore_index,
            "label_smoothing": head.label_smoothing, "z_loss": head.z_loss, "exchange": self.exchange,
            "trunk_gradients": self.trunk_gradients, "sync": self.sync, "version": __version__,
        }  # fmt: skip
        self.ranks.agree(facts, "the settings of a head")

    def whole(self, own: Tensor) -> Tensor:
        """The rows of all classes from those of each rank, on every rank."""
        sizes = [len(ClassShard(self.layout.n_classes, r, self.ranks.size)) for r in range(self.ranks.size)]
        every = own.new_empty(self.layout.n_classes, *own.shape[1:])
        for r, part in enumerate(self.ranks.gather_rows(own, sizes, "weights").split(sizes)):
            every[r :: self.ranks.size] = part
        return every

    @property
    def chunks(self) -> Chunks:
        """Consecutive classes, as in files and DTensors."""
        return Chunks(self.ranks, self.layout)

    def trunk_factor(self) -> float:
        """The factor of the gradients by hidden rows: the number of ranks if a wrapper divides by it, as a DDP around
        the head does, else 1."""
        averaged = self.trunk_gradients == "mean" or (
            self.trunk_gradients is None and DistributedDataParallel._get_active_ddp_module() is not None
        )
        return float(self.ranks.size) if averaged else 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        """For a copy of the head: on the same ranks, without the pending step."""
        return replace(self, unsettled=None)

    def exchange_for(self, sizes: list[int], n_columns: int) -> str:
        """ "hidden" gathers the rows of the others, "rows" the columns and the rows of its labels."""
        if self.exchange is not None:
            return self.exchange
        R, B = self.ranks.size, max(sizes)
        return "rows" if (n_columns + B) / R < B else "hidden"


def shards_of(
    process_group: Any, n_classes: int, softmax: bool, exchange: str | None, trunk_gradients: str | None, sync: bool
) -> Shards | None:
    """The shards for a head's arguments; None without a process group."""
    for name, value, names in (
        ("exchange", exchange, EXCHANGES),
        ("trunk_gradients", trunk_gradients, TRUNK_GRADIENTS),
    ):
        if value is not None and process_group is None:
            raise ValueError(f"{name}={value!r} is about ranks that share the classes; it needs process_group.")
        if value is not None and value not in names:
            raise ValueError(f"Expected {name} to be None or one of {', '.join(map(repr, names))}, found {value!r}.")
    if process_group is None:
        if sync:
            raise ValueError("sync=True is about ranks that share the classes; it needs process_group.")
        return None
    ranks = Ranks.of(process_group)
    return Shards(ranks, ClassShard(n_classes, ranks.rank, ranks.size), softmax, exchange, trunk_gradients, sync)


class OwnClasses(EveryClass):
    """Exchange "hidden": `weight` has this rank's classes, and the rows of all ranks are gathered."""

    def __init__(self, shards: Shards, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.ranks, self.layout, self.softmax = shards.ranks, shards.layout, shards.softmax
        self.n_classes = self.layout.n_classes

    def have_finite_weights(self, label: Tensor, part: slice) -> Tensor:
        own = self.layout.is_own(label)
        bad = own & ~self.weight[torch.where(own, self.layout.row(label), 0)].isfinite().all(dim=1)
        return self.ranks.sum_(bad.to(torch.int32), "finding labels whose weights are not finite") == 0

    def kept(self, columns: Columns) -> Columns:
        return columns.at(self.layout.is_own(columns.classes))

    def class_rows(self, classes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return class_rows(self.weight, self.bias, self.layout.row(classes), dtype)

    def label_scores(self, hidden: Tensor, label: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Label rows of other ranks are zero, since gradients by hidden rows are summed over ranks."""
        own = self.layout.is_own(label)
        psi, rows = label_scores(hidden, self.weight, self.bias, torch.where(own, self.layout.row(label), 0))
        psi = self.ranks.sum_(torch.where(own, psi, 0.0), "the sum of label scores")
        return psi, torch.where(own[:, None], rows, 0.0)

    def rows(self, classes: Tensor) -> Tensor:
        return self.layout.own_rows(classes)

    def reduce(self, sums: Reduced) -> Reduced:
        """A softmax's sum of omega_k e^{psi_k - c} in float64 needs no common shift over ranks."""
        if self.softmax:
            total = sums.grad_class * torch.exp(sums.ref.double().clamp(-MOST_REF, MOST_REF))
            return in_units(self.ranks.sum_(total, "the sum over classes"), sums)
        every = torch.stack([sums.grad_class, sums.value, sums.bend])
        grad_class, value, bend = self.ranks.sum_(every, "the sums over classes")
        return Reduced(grad_class, value, bend, sums.ref)

    def log_sum(self, values: Tensor) -> Tensor:
        return torch.logsumexp(self.ranks.gather(values, "log sums over classes"), dim=0)

    def sum_over_classes(self, values: Tensor) -> Tensor:
        return self.ranks.sum_(values.clone(), "a sum over classes")

    def whole(self, psi: Tensor) -> Tensor:
        """Class k is row k // R of rank k mod R: the ranks' columns interleave."""
        widest = -(-self.n_classes // self.ranks.size)
        own = torch.nn.functional.pad(psi, (0, widest - psi.shape[1]))
        return self.ranks.gather(own, "scores").permute(1, 2, 0).flatten(1)[:, : self.n_classes]

    def own_columns(self, of_classes: Tensor) -> Tensor:
        return of_classes[:, self.ranks.rank :: self.ranks.size]

    def highest(self, scores: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        width = min(k, -(-self.n_classes // self.ranks.size))
        missing = width - scores.shape[1]
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        classes = torch.nn.functional.pad(self.layout.classes(rows), (0, missing), value=self.n_classes)
        every, theirs = (self.ranks.gather(x, "highest scores").permute(1, 0, 2).flatten(1) for x in (scores, classes))
        by_class = torch.argsort(theirs, dim=1)
        every, theirs = every.gather(1, by_class), theirs.gather(1, by_class)
        best = torch.argsort(every.nan_to_num(nan=-torch.inf), dim=1, descending=True, stable=True)[:, :k]
        return every.gather(1, best), theirs.gather(1, best)


def in_units(total: Tensor, sums: Reduced) -> Reduced:
    """`Reduced` of a softmax's sum (B,)."""
    log_total = torch.log(total).clamp_min(-MOST_REF)
    ref = torch.where((log_total.abs() > FAR) & log_total.isfinite(), log_total, 0.0)
    return sums._replace(grad_class=total * torch.exp(-ref), ref=ref.to(sums.ref.dtype))


class GatheredRows(EveryClass):
    """Exchange "rows": the rows of this rank's labels and all columns are fetched from their owners."""

    def __init__(self, shards: Shards, sizes: list[int], weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.ranks, self.layout, self.sizes = shards.ranks, shards.layout, sizes
        self.n_classes = self.nobody = self.layout.n_classes
        self.first_row = sum(sizes[: self.ranks.rank])
        self.columns: Tensor | None = None  # of the gradients; none for a second sample

    def begin(self, label: Tensor) -> None:
        """Fetch the rows of these labels, with their biases."""
        sent = _Mail(self.ranks, self.layout, label)
        self.label_rows = sent.back(self._with_bias(self.layout.row(sent.received)))

    def labels(self, label: Tensor, usable: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, slice]:
        three = self.ranks.gather_rows(torch.stack([label, usable.long(), group], dim=1), self.sizes, "labels")
        every, all_usable, groups = three.T.contiguous()
        return every, all_usable != 0, groups, slice(self.first_row, self.first_row + len(label))

    def kept(self, columns: Columns) -> Columns:
        if self.columns is None:
            self.columns = columns.classes
        return columns

    def have_finite_weights(self, label: Tensor, part: slice) -> Tensor:
        return self.label_rows[part, : self.weight.shape[1]].isfinite().all(dim=1)

    def class_rows(self, classes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        order, counts = _by_owner(self.layout, classes)
        own = self._with_bias(self.layout.row(classes[self.layout.is_own(classes)]))
        every = torch.empty(len(classes), own.shape[1], dtype=own.dtype, device=own.device)
        every[order] = self.ranks.gather_rows(own, counts, "sampled rows")
        return class_rows(*self._split(every), torch.arange(len(classes), device=every.device), dtype)

    def label_scores(self, hidden: Tensor, label: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        every = torch.arange(len(hidden), device=hidden.device)
        return label_scores(hidden, *self._split(self.label_rows[part]), every)

    def home(self, found: RowGradient) -> RowGradient:
        """Send gradients to the ranks of their classes; those by columns are reduced."""
        assert self.columns is not None
        assert found.labels is not None
        order, counts = _by_owner(self.layout, self.columns)
        by_column = torch.cat([found.values, found.bias[:, None]], dim=1)[order]  # the row of smoothing is of no class
        by_column = self.ranks.scatter_sum(by_column, counts, "gradients by sampled rows")
        classes = found.classes[order].split(counts)[self.ranks.rank]
        target, scale, hidden = found.labels
        sent = _Mail(self.ranks, self.layout, target)
        by_label = sent.there(scale[:, None] * torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1))
        every = torch.cat([by_column, by_label.to(by_column.dtype)])
        classes = torch.cat([classes, sent.received])
        rows = self.layout.own_rows(classes).masked_fill(classes == self.nobody, len(self.weight))
        return RowGradient(rows, every[:, :-1], every[:, -1])

    def report(self, found: Report) -> Report:
        given = [x for x in found if x is not None]
        sums = iter(self.totals(*given))
        return Report(*(None if x is None else next(sums) for x in found))  # type: ignore[arg-type]

    def totals(self, *sums: Tensor) -> tuple[Tensor, ...]:
        flat = self.ranks.sum_(torch.cat([x.detach().reshape(-1).double() for x in sums]), "sums over rows")
        parts = flat.split([x.numel() for x in sums])
        return tuple(part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, sums, strict=True))

    def _with_bias(self, rows: Tensor) -> Tensor:
        """(n, D + 1) weight rows of this rank, each with its bias."""
        weight = self.weight[rows]
        bias = weight.new_zeros(len(rows)) if self.bias is None else self.bias[rows].to(weight.dtype)
        return torch.cat([weight, bias[:, None]], dim=1)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return rows[:, :-1], None if self.bias is None else rows[:, -1]


def _by_owner(layout: ClassShard, classes: Tensor) -> tuple[Tensor, list[int]]:
    """(the order that sorts classes by rank, the number of each rank)."""
    owner = layout.owner(classes)
    counts = torch.bincount(owner, minlength=layout.n_ranks).tolist()
    return torch.argsort(owner, stable=True), counts


class _Mail:
    """All-to-all of rows to the owners of their classes, and back. `received`: the classes requested from this rank."""

    def __init__(self, ranks: Ranks, layout: ClassShard, classes: Tensor) -> None:
        self.ranks = ranks
        self.order, self.given = _by_owner(layout, classes)
        one_each = [1] * ranks.size
        counts = torch.tensor(self.given, device=classes.device)
        self.taken = ranks.swap(counts, one_each, one_each, "counts of labels").tolist()
        self.received = self.there(classes)

    def there(self, values: Tensor) -> Tensor:
        return self.ranks.swap(values[self.order], self.given, self.taken, "rows of labels")

    def back(self, values: Tensor) -> Tensor:
        got = self.ranks.swap(values, self.taken, self.given, "rows of labels")
        out = torch.empty_like(got)
        out[self.order] = got
        return out
