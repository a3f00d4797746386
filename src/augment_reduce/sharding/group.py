"""The collectives of a sharded step, with counters of the bytes sent, and errors raised on every rank.

If one rank raises, the others wait in their next collective until a time limit. Errors of a single rank (its rows, its
files) are therefore exchanged before the first collective of a step (`raise_together`): all ranks raise, or none. If a
rank dies or hangs, the others name it when their collective fails.

A backend thread that frees one of our tensors needs the interpreter's lock; while the interpreter exits this aborts the
process ("terminate called without an active exception"). The tensors of the last collectives are therefore kept, and at
exit `_leave_nothing_under_way` waits for pending collectives and until the backend has released their tensors.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # its name before torch 2.13
REPORT_SECONDS = 2.0  # how long ranks whose collective failed wait for each other's report
REPORT_SECONDS_OF_TWO = 0.3  # of two ranks: there is no third to report, and launchers soon end the other


KEPT, KEPT_BYTES = 4, 1 << 20  # the number of last collectives whose tensors are kept; the largest size in bytes
LAST_WAIT, LAST_RELEASE = 5.0, 0.5  # seconds at exit: for each pending sum; until the backend releases the tensors


class RankError(RuntimeError):
    """An error on another rank, or different arguments on the ranks."""


class RankStopped(RankError):
    """An error that another rank has reported: no rank has failed, and all can continue."""


class Ranks:
    """A process group, or one process alone (`group` None and no default group, or a group of one).

    `bytes_sent` counts the bytes that this rank's collectives send, as ring algorithms; `payload` the bytes of the
    tensors; `rounds` the collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.bytes_sent = self.payload = self.rounds = 0
        self._failures = 0

    @staticmethod
    def of(group: Any) -> Ranks:
        """The ranks of a ProcessGroup, a one-dimensional DeviceMesh, or None (one process)."""
        if group is None:
            return Ranks(None)
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "Expected an initialized process group; call torch.distributed.init_process_group first (under "
                "torchrun its defaults suffice)."
            )
        if hasattr(group, "get_group"):  # DeviceMesh
            if group.ndim != 1:
                raise ValueError(
                    f"Expected a DeviceMesh of one dimension, found {group.ndim} ({group.mesh_dim_names}). Pass the "
                    "dimension to shard classes over: mesh['classes']."
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"Expected a ProcessGroup or a DeviceMesh, found {type(group).__name__}.")
        return Ranks(group)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("A process group belongs to its processes and cannot be pickled. Save a state dict instead.")

    # ---- collectives: called by every rank, in the same order ----

    def sum_(self, values: Tensor, what: str = "a sum") -> Tensor:
        """The sum over ranks, in place; bit-equal on every rank."""
        if self.size > 1:
            self._count(values, 2 * (self.size - 1) / self.size)
            with self._named(what):
                dist.all_reduce(values, group=self.group)
            _keep(values)
        return values

    def start_sum(self, values: Tensor, what: str = "a sum") -> PendingSum:
        """Asynchronous `sum_`: `.wait()` returns the sum."""
        if self.size == 1:
            return PendingSum(self, values, None, what)
        self._count(values, 2 * (self.size - 1) / self.size)
        with self._named(what):
            pending = PendingSum(self, values, dist.all_reduce(values, group=self.group, async_op=True), what)
        _under_way.add(pending)
        return pending

    def max_(self, values: Tensor, what: str = "a maximum") -> Tensor:
        if self.size > 1:
            self._count(values, 2 * (self.size - 1) / self.size)
            with self._named(what):
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
            _keep(values)
        return values

    def gather(self, values: Tensor, what: str = "rows") -> Tensor:
        """(R, ...): the same-shaped tensors of all ranks."""
        if self.size == 1:
            return values[None]
        self._count(values, self.size - 1)
        out, values = [torch.empty_like(values) for _ in range(self.size)], values.contiguous()
        with self._named(what):
            dist.all_gather(out, values, group=self.group)
        _keep(values, *out)
        return torch.stack(out)

    def gather_rows(self, values: Tensor, sizes: list[int], what: str = "rows") -> Tensor:
        """The rows of all ranks, concatenated by rank; `sizes` has the number of each."""
        if self.size == 1:
            return values
        every = self.gather(_padded(values, max(sizes)), what)
        return torch.cat([part[:n] for part, n in zip(every, sizes, strict=True)])

    def scatter_sum(self, values: Tensor, sizes: list[int], what: str = "gradients") -> Tensor:
        """Reduce-scatter: the sum over ranks of this rank's rows, in the order of `gather_rows`."""
        if self.size == 1:
            return values
        width = max(sizes)
        parts = torch.stack([_padded(part, width) for part in values.split(sizes)])
        self._count(parts, (self.size - 1) / self.size)
        out, parts = torch.empty_like(parts[0]), parts.flatten(0, 1).contiguous()
        with self._named(what):
            reduce_scatter(out, parts, group=self.group)
        _keep(out, parts)
        return out[: sizes[self.rank]]

    def swap(self, values: Tensor, given: list[int], taken: list[int], what: str = "rows") -> Tensor:
        """All to all: `given[r]` rows, in the order of ranks, go to rank r; `taken[r]` come from it."""
        if self.size == 1:
            return values
        others = sum(given) - given[self.rank]
        row_bytes = values.element_size() * values[:1].numel() if len(values) else 0
        self.payload += others * row_bytes
        self.bytes_sent += others * row_bytes
        self.rounds += 1
        out, values = values.new_empty(sum(taken), *values.shape[1:]), values.contiguous()
        with self._named(what):
            dist.all_to_all_single(out, values, taken, given, group=self.group)
        _keep(out, values)
        return out

    def gather_text(self, text: str, what: str = "a message") -> list[str]:
        """The strings of all ranks."""
        if self.size == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(self.device())
        sizes = self.gather(torch.tensor([len(data)], device=data.device), what)[:, 0].tolist()
        every = self.gather(_padded(data, max(sizes)), what)
        return [bytes(part[:n].tolist()).decode().strip() for part, n in zip(every, sizes, strict=True)]

    def barrier(self, what: str = "a barrier") -> None:
        self.sum_(torch.zeros(1, device=self.device()), what)

    def device(self) -> torch.device:
        """The device required for tensors of collectives."""
        backend = dist.get_backend(self.group) if self.group is not None else "gloo"
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    def _count(self, values: Tensor, factor: float) -> None:
        self.payload += values.nbytes
        self.bytes_sent += int(factor * values.nbytes)
        self.rounds += 1

    # ---- agreement ----

    def agree(self, facts: dict[str, Any], what: str) -> None:
        """RankError on every rank, with the value of each, unless `facts` (of JSON's types) are equal."""
        every = [json.loads(text) for text in self.gather_text(json.dumps(facts, sort_keys=True), what)]
        differing = sorted({name for one in every for name in {*every[0], *one} if one.get(name) != every[0].get(name)})
        if differing:
            values = "; ".join(
                f"{name}: " + ", ".join(f"{one.get(name)!r} on rank {r}" for r, one in enumerate(every))
                for name in differing
            )
            raise RankError(f"Expected {what} to be the same on every rank, but {values}.")

    @contextlib.contextmanager
    def agree_on_errors(self, what: str) -> Iterator[None]:
        """Run the body; if it raises on any rank, all ranks raise. One small collective; the body must not have any."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        self.raise_together(error, what)

    def raise_together(self, error: Exception | None, what: str, number: int = 0) -> list[int]:
        """Raise on every rank if any has an error; else the `number`s of all ranks."""
        if self.size == 1:
            if error is not None:
                raise error
            return [number]
        told = torch.tensor([number, int(error is not None)], device=self.device())
        every = self.gather(told, what)
        if not bool(every[:, 1].any()):
            return every[:, 0].tolist()
        messages = self.gather_text("" if error is None else f"{type(error).__name__}: {error}", what)
        if error is not None:
            raise error
        rank = next(r for r, message in enumerate(messages) if message)
        raise RankStopped(f"Rank {rank} stopped {what}: {messages[rank]}")

    # ---- ranks that do not answer ----

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            missing = self._missing()
            who = f"rank {', '.join(map(str, missing))} did" if missing else "one of them did"
            raise RankError(
                f"{self!r}: {what} needs every rank, and {who} not answer: it died, hangs, or stopped with an error of "
                f"its own. Look at its output; start all ranks again from the last checkpoint (torchrun "
                f"--max-restarts does that). The backend says: {str(error).splitlines()[0]}"
            ) from error

    def _missing(self) -> list[int]:
        """The ranks that do not report the failed collective through the store."""
        self._failures += 1
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            ranks = dist.get_process_group_ranks(self.group)
            prefix = f"augment_reduce/failed/{self._failures}/"
            store.set(f"{prefix}{dist.get_rank()}", "1")
            limit = REPORT_SECONDS if len(ranks) > 2 else REPORT_SECONDS_OF_TWO
            waiting, end = set(ranks), time.monotonic() + limit
            while waiting and time.monotonic() < end:
                waiting = {r for r in waiting if not store.check([f"{prefix}{r}"])}
                time.sleep(0.05)
            return sorted(waiting)
        return []


class PendingSum:
    """A pending all-reduce."""

    def __init__(self, ranks: Ranks, values: Tensor, work: Any, what: str) -> None:
        self.ranks, self.values, self.work, self.what = ranks, values, work, what

    def wait(self) -> Tensor:
        if self.work is not None:
            with self.ranks._named(self.what):
                self.work.wait()
            self.work = None
            _under_way.discard(self)
            _keep(self.values)
        return self.values


_under_way: weakref.WeakSet[PendingSum] = weakref.WeakSet()
_tensors_of_last: collections.deque[list[Tensor]] = collections.deque(maxlen=KEPT)


def _keep(*tensors: Tensor) -> None:
    """Keep the tensors of a collective; those above KEPT_BYTES are released, since their memory may be needed."""
    _tensors_of_last.append(list(tensors) if sum(x.nbytes for x in tensors) <= KEPT_BYTES else [])


@atexit.register
def _leave_nothing_under_way() -> None:
    """Wait for pending collectives, and until the backend has released the tensors, each up to a time limit."""
    for pending in list(_under_way):
        with contextlib.suppress(RuntimeError):  # of a rank that has died
            assert pending.work is not None
            pending.work.wait(timedelta(seconds=LAST_WAIT))
        pending.work = None
        _under_way.discard(pending)
        _keep(pending.values)
    if _tensors_of_last:
        time.sleep(0.01)  # for tensors that were not kept
    end = time.monotonic() + LAST_RELEASE
    while any(_owners(x) > 1 for tensors in _tensors_of_last for x in tensors) and time.monotonic() < end:
        time.sleep(0.001)


def _owners(x: Tensor) -> int:
    return x._use_count() if hasattr(x, "_use_count") else 1


def _forget() -> None:
    """In a forked process, which has no backend threads."""
    _under_way.clear()
    _tensors_of_last.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _padded(values: Tensor, n_rows: int) -> Tensor:
    if len(values) == n_rows:
        return values
    return torch.cat([values, values.new_zeros(n_rows - len(values), *values.shape[1:])])
