"""The sampled classes of one step of a head: drawn on its device, once for the whole minibatch.

    class_sampling         drawn                                                            omega_k
    "uniform-shared"       without replacement from all K                                   K / |S|
    "frequency-shared"     from q with replacement, q = (1 - u) n_k^power / sum + u / K     1 / (|S| q_k)
    "stratified-shared"    the most frequent ones always; of the others one from            1 / E[number of draws], 1
    for
                           each of the strata into which their q is cut                     those always drawn
    "all"                  every class                                                      1

A row's own label is masked, so that E[sum_{k in S, k != y} omega_k f_k] = sum_{k != y} f_k for any f. The variance with
strata is never larger than that of independent draws from the same q, and frequent classes are not drawn repeatedly.
After construction no operation costs O(K) or synchronises with the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sampling import (
    AllClasses,
    ClassSampler,
    FrequencyShared,
    HardNegativeCache,
    HeadAndTail,
    UniformShared,
    certain_classes,
    frequencies,
)
from . import _hash
from ._columns import Columns, with_labels
from ._state import Kept, buffer

UNIFORM, INDEPENDENT, STRATA, EVERY = 0, 1, 2, 3
KINDS = {"uniform-shared": UNIFORM, "frequency-shared": INDEPENDENT, "stratified-shared": STRATA, "all": EVERY}


class Drawn(NamedTuple):
    """`classes` (S,) int64 and `log_weight` (S,) float32, log omega; each row masks its own label."""

    classes: Tensor
    log_weight: Tensor


class DrawnFor(NamedTuple):
    """C columns for given labels: `classes` (C,), `log_weight` (C,) or (B, C), and `mask` (B, C), True for masked
    columns: `own_label_mask` of `sampled_bound`."""

    classes: Tensor
    log_weight: Tensor
    mask: Tensor


class SharedSampler(Kept):
    """Draws |S| classes for a minibatch from (seed, step): tables on the device, made once.

    - `class_sampling`: a name of the table above, or a shared sampler of `augment_reduce.sampling`;
    - `class_counts`: (K,) training rows of each class; required for sampling by frequency;
    - `power`, `uniform_share`: of q in the table; a share u > 0 bounds the weights and includes unseen classes.
    """

    certain: Tensor
    cumulative: Tensor
    share: Tensor

    def __init__(
        self,
        n_classes: int,
        n_sampled_classes: int,
        class_sampling: str | ClassSampler | None = None,
        class_counts: Tensor | np.ndarray | None = None,
        *,
        power: float = 1.0,
        uniform_share: float = 0.1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(class_sampling, FrequencyShared | HeadAndTail):
            power, uniform_share = class_sampling.power, class_sampling.uniform_share
        self.name = _resolve(class_sampling, class_counts is not None)
        self.kind = KINDS[self.name]
        self.n_classes = n_classes
        _check_size(n_classes, n_sampled_classes)
        certain = torch.zeros(0, dtype=torch.int64, device="cpu")
        cumulative = torch.zeros(0, dtype=torch.float64, device="cpu")
        if self.kind == EVERY:
            n_sampled_classes = n_classes
            certain = torch.arange(n_classes, device="cpu")
        elif self.kind != UNIFORM:
            q = frequencies(_checked_counts(class_counts, n_classes, self.name), power, uniform_share)
            if self.kind == STRATA:
                certain = torch.from_numpy(certain_classes(q, n_sampled_classes))
                q[certain.numpy()] = 0.0
            cumulative = torch.from_numpy(np.cumsum(q))
        share = _shares(class_counts, n_classes)
        self.n_sampled = n_sampled_classes
        device = torch.get_default_device() if device is None else device
        buffer(self, "certain", certain.to(device), saved=self.kind != EVERY)
        buffer(self, "cumulative", cumulative.to(device))
        buffer(self, "share", share.to(device))
        self._tables = (certain, cumulative, share) if self.is_meta else None  # until buffers are allocated

    @property
    def n_certain(self) -> int:
        """The number of classes that are in every draw; they come first."""
        return len(self.certain)

    def reset_buffers(self) -> None:
        if self._tables is not None:
            for buffered, table in zip((self.certain, self.cumulative, self.share), self._tables, strict=True):
                buffered.copy_(table)
            self._tables = None

    def n_drawn(self, stream: int) -> int:
        """The number of classes in a draw of this stream: |S|; for the second sample about half of the random ones."""
        if stream == _hash.MAIN:
            return self.n_sampled
        return self.n_certain + (self.n_sampled - self.n_certain + 1) // 2

    def expected(self, classes: Tensor) -> Tensor:
        """E[number of draws] of these classes in a main draw, float32."""
        n = self.n_sampled - self.n_certain
        if self.kind == EVERY:
            return torch.ones(len(classes), device=classes.device)
        if self.kind == UNIFORM:
            return torch.full((len(classes),), n / self.n_classes, device=classes.device)
        mass = self.cumulative[classes] - torch.where(classes > 0, self.cumulative[(classes - 1).clamp_min(0)], 0.0)
        times = n * mass / self.cumulative[-1]
        if self.kind == STRATA:  # classes that are always drawn have no mass in the strata
            times = torch.where(mass > 0.0, times, 1.0)
        return times.float()

    def share_of(self, classes: Tensor) -> Tensor:
        """f of these classes, float32: their label frequencies by the class counts."""
        return self.share[classes]

    @property
    def knows_shares(self) -> bool:
        return len(self.share) > 0

    def draw(
        self, key: int | None = None, counter: Tensor | None = None, stream: int = _hash.MAIN, *,
        generator: torch.Generator | None = None,
    ) -> Drawn:  # fmt: skip
        """Classes and their log omega: `classes, log_weight = sampler.draw()`.

        Every call draws anew, seeded by `generator` (a CPU generator; None: torch's global one). A head passes (key,
        counter, stream) instead, which determine the draw on every device.
        """
        if key is None:
            key = _hash.seed_key(int(torch.randint(2**63 - 1, (), generator=generator, device="cpu")))
        if counter is None:
            counter = torch.zeros((), dtype=torch.int64, device=self.cumulative.device)
        n = self.n_drawn(stream) - self.n_certain
        place = torch.arange(n, device=counter.device)
        log_weight = torch.zeros(self.n_certain + n, device=counter.device)
        if n == 0:
            return Drawn(self.certain, log_weight)
        random = _hash.step_key(key, counter, stream)
        if self.kind == UNIFORM:
            log_weight.fill_(np.log(self.n_classes / n))
            return Drawn(_hash.permuted(random, place, self.n_classes), log_weight)
        total = self.cumulative[-1]
        share = _hash.uniform(random, place) if self.kind == INDEPENDENT else _hash.in_stratum(random, place) / n
        at = share * total
        classes = torch.searchsorted(self.cumulative, at, right=True).clamp_max_(self.n_classes - 1)
        below = torch.where(classes > 0, self.cumulative[(classes - 1).clamp_min(0)], 0.0)
        log_weight[self.n_certain :] = torch.log(total / (n * (self.cumulative[classes] - below))).float()
        return Drawn(torch.cat([self.certain, classes]), log_weight)

    def draw_for(
        self, target: Tensor, *, group: Tensor | None = None, near: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DrawnFor:  # fmt: skip
        """A new draw, with the mask of each row of a minibatch with labels `target` (B,).

        With class counts the labels are added, as in a head (`nn/_columns.py`; `group` as there). `near` (H,): classes
        that are always included, with weight 1, such as hard negatives; they must not depend on this draw, may repeat,
        and a number below 0 is ignored.
        """
        drawn = self.draw(generator=generator)
        columns = Columns(drawn.classes, drawn.log_weight)
        if self.knows_shares and self.kind != EVERY:
            every = torch.cat([drawn.classes, target])
            usable = torch.ones_like(target, dtype=torch.bool)
            expected, share = self.expected(every), self.share_of(every)
            columns = with_labels(drawn.classes, target, usable, group, expected, share, None)
        log_weight, mask = columns.of_rows(slice(None), target)
        if near is None:
            return DrawnFor(columns.classes, log_weight, mask)
        near = torch.sort(near.reshape(-1)).values
        again = torch.cat([near.new_zeros(1, dtype=torch.bool), near[1:] == near[:-1]]) | (near < 0)
        place = torch.searchsorted(near, columns.classes).clamp_max(len(near) - 1)
        mask = mask | (near[place] == columns.classes)
        near_mask = (target[:, None] == near) | again
        sure = log_weight.new_zeros(*log_weight.shape[:-1], len(near))
        return DrawnFor(
            torch.cat([columns.classes, near.clamp_min(0)]),
            torch.cat([log_weight, sure], dim=-1),
            torch.cat([mask, near_mask], 1),
        )

    def get_extra_state(self) -> Tensor:
        """The parameters of a draw other than the tables, as bytes."""
        recipe = f"{self.name} {self.n_sampled} {self.n_classes}"
        return torch.tensor(list(recipe.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        found = bytes(state.tolist()).decode().split()
        expected = bytes(self.get_extra_state().tolist()).decode().split()
        if found != expected:
            raise ValueError(
                f"Expected the state of a head with class_sampling={self.name!r}, n_sampled_classes={self.n_sampled} "
                f"and {self.n_classes} classes, found {' '.join(found)!r}: its draws would be others than those of the "
                "training that it continues. Construct the head with the settings of the state."
            )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """The state's tables replace those of the constructor, so that resumed training has the same draws."""
        if prefix + "share" not in state_dict:  # an older state without shares: keep the constructor's
            state_dict = {**state_dict, prefix + "share": self.share}
        found = {name: state_dict.get(prefix + name) for name in ("certain", "cumulative")}
        if self.kind == EVERY:
            found.pop("certain")
        if prefix + "_extra_state" in state_dict:  # before the tables: its error is clearer than that of a wrong size
            self.set_extra_state(state_dict[prefix + "_extra_state"])
            for name, table in [*found.items(), ("share", state_dict[prefix + "share"])]:
                if isinstance(table, Tensor) and table.shape != getattr(self, name).shape:
                    setattr(self, name, getattr(self, name).new_empty(table.shape))
            _check_tables(found, self.n_classes, self.n_sampled)
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        if self.kind == EVERY:  # not in the state, and not allocated by `to_empty`
            self.certain = torch.arange(self.n_classes, device=self.cumulative.device)
        if self._tables is not None and not self.is_meta:
            self._tables = None
        if len(missing) < len(found) + 1:  # some, not all: an incomplete state
            missing_keys.extend(missing)
        elif found:
            warnings.warn(
                "This state was saved without the tables of its class sampler; the head keeps its own. Its draws are "
                "those of the saved training only if class_counts and n_sampled_classes are the same.",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return f"{self.name}, {self.n_sampled} of {self.n_classes}, {self.n_certain} of them always"


def _check_tables(tables: Mapping[str, Tensor | None], n_classes: int, n_sampled: int) -> None:
    """ValueError if a state's tables are not valid for indexing. Reads them: O(K), once a load."""
    certain, cumulative = tables.get("certain"), tables.get("cumulative")
    if certain is not None and len(certain):
        inside = certain.dtype == torch.int64 and certain.ndim == 1 and len(certain) <= n_sampled
        if not inside or int(certain.min()) < 0 or int(certain.max()) >= n_classes:
            raise ValueError(f"Expected sampler.certain to hold at most {n_sampled} classes below {n_classes}.")
    if cumulative is not None and len(cumulative):
        grows = len(cumulative) == n_classes and bool((cumulative[1:] >= cumulative[:-1]).all())
        if not grows or not bool(torch.isfinite(cumulative).all()) or not float(cumulative[-1]) >= 0.0:
            raise ValueError(f"Expected sampler.cumulative to hold {n_classes} growing, finite numbers.")


def _resolve(class_sampling: str | ClassSampler | None, has_counts: bool) -> str:
    if class_sampling is None:
        return "stratified-shared" if has_counts else "uniform-shared"
    if isinstance(class_sampling, UniformShared | FrequencyShared | AllClasses):
        return class_sampling.name
    if isinstance(class_sampling, HeadAndTail) and not isinstance(class_sampling, HardNegativeCache):
        return "stratified-shared"
    if isinstance(class_sampling, str) and class_sampling in KINDS:
        return class_sampling
    raise ValueError(
        f"Expected class_sampling to be one of {', '.join(map(repr, KINDS))} or a sampler that a minibatch shares "
        f"(UniformShared, FrequencyShared, HeadAndTail, AllClasses), found {class_sampling!r}. Classes drawn for each "
        "row would make the head gather B |S| rows of weights a step; the estimator has those samplers."
    )


def _check_size(n_classes: int, n_sampled_classes: int) -> None:
    if n_classes < 2:
        raise ValueError(f"Expected n_classes of at least 2, found {n_classes}: with one class there is no rest.")
    if n_classes >= 2**31:
        raise ValueError(
            f"Expected n_classes below 2^31, since classes are 32-bit numbers on a GPU; found {n_classes}."
        )
    if not 1 <= n_sampled_classes <= n_classes:
        raise ValueError(
            f"Expected n_sampled_classes between 1 and n_classes={n_classes}, found {n_sampled_classes}. "
            'With so few classes, class_sampling="all" with n_sampled_classes=n_classes is exact.'
        )


def _shares(class_counts: Tensor | np.ndarray | None, n_classes: int) -> Tensor:
    """f (K,), each class's share of the counts; empty without counts."""
    if class_counts is None:
        return torch.zeros(0, device="cpu")
    counts = _checked_counts(class_counts, n_classes, "")
    return torch.from_numpy((counts / counts.sum()).astype(np.float32))


def _checked_counts(class_counts: Tensor | np.ndarray | None, n_classes: int, name: str) -> np.ndarray:
    if class_counts is None:
        raise ValueError(
            f"class_sampling={name!r} needs class_counts, the (n_classes,) number of training rows of each class "
            '(torch.bincount(targets, minlength=n_classes)); or pass class_sampling="uniform-shared".'
        )
    counts = np.asarray(class_counts.cpu() if isinstance(class_counts, Tensor) else class_counts, dtype=np.float64)
    if counts.shape != (n_classes,) or not np.isfinite(counts).all() or (counts < 0).any() or counts.sum() <= 0:
        raise ValueError(
            f"Expected class_counts of shape ({n_classes},), finite, not negative and not all zero, "
            f"found shape {counts.shape} with smallest {counts.min() if counts.size else None}."
        )
    return counts
