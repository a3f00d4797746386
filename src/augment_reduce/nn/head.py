"""`AugmentReduceHead`: the output layer and the loss of a network with very many classes, in one module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..noise import Gumbel, Logistic, Noise, resolve_noise
from ..optim import RowOptimizer
from ..sampler import ClassSampler
from . import _hash, _predict
from ._backend import backend_for
from ._checks import check_hidden, check_reduction, flat_rows
from ._draw import SharedSampler
from ._local import SECOND_SHARE, Local
from ._rows import RowUpdate
from ._state import Kept, buffer
from ._step import BoundLoss, Step, out_of_range

BOUND_NODES = 20  # Gauss-Hermite nodes where the bound is reported rather than trained on


class AugmentReduceHead(nn.Module):
    """A linear layer over K classes with its loss, trained at a cost that does not grow with K.

        head = AugmentReduceHead(512, 1_000_000, class_counts=counts, optimizer="adagrad")
        loss = head(hidden, target)            # training: negative lower bound on log p, from sampled classes
        loss.backward()                        # gradient to hidden; with an optimizer, the weights move here
        head.log_prob(hidden, target)          # evaluation: exact, over all classes in blocks
        head.topk(hidden, 10)

    The loss is unbiased for minus the bound of eq. (7) or (8), and so are its gradients, the local parameters held.

    - `model`: "softmax", "probit", "logistic", or a `Noise`;
    - `n_sampled_classes`: |S|, shared by the minibatch; `class_sampling`: how they are drawn (`nn/_draw.py`). By
      default "stratified-shared" with `class_counts` (K,), the training rows of each class, else "uniform-shared";
    - `local`: where each row's q comes from (`nn/_local.py`): "amortised", "persistent" (needs `n_rows`, and `index` at
      every call) or "fresh", corrected by a second sample;
    - `optimizer`: None gives weight and bias row-sparse gradients (`sparse_grad=False`: dense ones), for a torch
      optimiser of yours. "adagrad", "rowwise-adagrad", "adam" or an object of `augment_reduce.optim` lets the backward
      pass itself move the touched rows, once per call of backward; keep weight and bias out of your optimiser then;
    - `floor`: a safeguard against a local parameter that is far too low for its row: no row's negative part counts more
      than e^floor times what it should. Where it acts the gradient is biased; `floored_share` says how often. None is
      off, 0 is sampled softmax;
    - `n_nodes`: for models other than softmax, 1 draws one value of q(v) a row and step, more are Gauss-Hermite nodes;
    - `debug`: check targets at every call on a GPU too, which makes the host wait for it;
    - `generator`: a CPU generator, for the first weights and for the seed of all later draws.
    """

    tally: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        model: str | Noise = "softmax",
        *,
        n_sampled_classes: int | None = None,
        class_sampling: str | ClassSampler | None = None,
        class_counts: Tensor | np.ndarray | None = None,
        local: str = "amortised",
        n_rows: int | None = None,
        bias: bool = True,
        optimizer: str | RowOptimizer | None = None,
        learning_rate: float | None = None,
        sparse_grad: bool = True,
        floor: float | None = 1.0,
        n_nodes: int = 1,
        reduction: str = "mean",
        ignore_index: int = -100,
        debug: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_features < 1:
            raise ValueError(f"Expected in_features of at least 1, found {in_features}.")
        check_reduction(reduction)
        if floor is not None and floor < 0.0:
            raise ValueError(f"Expected floor to be None or at least 0 (0 is sampled softmax), found {floor}.")
        if optimizer is None and learning_rate is not None:
            raise ValueError(
                f"learning_rate={learning_rate} is for the head's own row optimiser, but optimizer is None. "
                'Pass optimizer="adagrad", or give the rate to your torch optimiser.'
            )
        self.in_features, self.n_classes = in_features, n_classes
        self.noise = resolve_noise(model)
        self.reduction, self.ignore_index, self.floor = reduction, ignore_index, floor
        self.sparse_grad, self.debug = sparse_grad, debug
        size = min(n_classes, 1024) if n_sampled_classes is None else n_sampled_classes
        self.sampler = SharedSampler(n_classes, size, class_sampling, class_counts, device=device)
        every = self.sampler.n_certain == n_classes  # the second sample is exact then
        self.local = Local(
            self.noise, in_features, n_classes, local, n_rows=n_rows, n_nodes=n_nodes, device=device,
            second_share=1.0 if every else SECOND_SHARE,
        )  # fmt: skip
        kept = optimizer is None  # autograd's business, or the row optimiser's
        seed = torch.randint(2**63 - 1, (2,), generator=generator)
        first = _first_weights(self.noise, (n_classes, in_features), bias, class_counts, int(seed[1]), device, dtype)
        self.weight = nn.Parameter(first[0], requires_grad=kept)
        self.bias = nn.Parameter(first[1], requires_grad=kept) if first[1] is not None else None
        self.optimizer = RowUpdate(optimizer, learning_rate, self.weight, self.bias) if optimizer is not None else None
        self.clock = _Clock(seed[:1], device)
        self._key: int | None = _hash.seed_key(int(seed[0]))

    def forward(
        self, hidden: Tensor, target: Tensor, index: Tensor | None = None, sample_weight: Tensor | None = None
    ) -> Tensor:
        """The training loss: minus the bound, reduced. hidden (..., D), target (...), index (...) numbers of training
        rows for "persistent", sample_weight (...). A target equal to `ignore_index` leaves its row out; "mean" divides
        by the weights of the rows that count (0 where none does)."""
        check_hidden(hidden, self.weight)
        training = self.training and torch.is_grad_enabled()
        step = Step(
            noise=self.noise,
            target=flat_rows("target", target, hidden, self.weight, integer=True),
            sampler=self.sampler,
            local=self.local,
            key=self.key,
            counter=self.clock.counter,
            tally=self.clock.tally,
            sample_weight=self._rows_or_none("sample_weight", sample_weight, hidden, integer=False),
            index=self._checked_index(index, hidden),
            floor=self.floor,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            learn=training,
            sparse=self.sparse_grad,
            update=self.optimizer if training else None,
        )
        rows = hidden.reshape(-1, self.in_features)
        # With the head's own optimiser no parameter asks for a gradient; the anchor keeps the backward pass alive.
        anchor = torch.zeros((), requires_grad=True) if step.update is not None else None
        backend = backend_for(step, hidden, self.weight)
        loss = BoundLoss.apply(rows, self.weight, self.bias, anchor, step, backend)
        if self.debug:
            self.check_targets()
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """log p(target | hidden), exact, (...): over all classes, in blocks. No gradient."""
        y = self._checked_target(hidden, target)
        return _predict.log_prob(self.noise, self._flat(hidden), self.weight, self.bias, y).reshape(target.shape)

    @torch.no_grad()
    def log_prob_bound(self, hidden: Tensor, target: Tensor, index: Tensor | None = None) -> Tensor:
        """The bound on `log_prob` that training goes by, with every class in it: how much is lost to the local step.

        "fresh" uses what is deterministic of it, the prediction that the second sample would correct.
        """
        y = self._checked_target(hidden, target)
        h = _predict.in_float(self._flat(hidden), self.weight)
        psi_y, _ = _predict.label_scores(h, self.weight, self.bias, y)
        parts = self.local.recall(self.local.predict(h, psi_y), self._checked_index(index, hidden))
        nodes = self.local.nodes(parts, self.key, self.clock.counter[0], BOUND_NODES)
        return _predict.bound(self.noise, h, self.weight, self.bias, y, nodes).reshape(target.shape)

    def log_normalizer(self, hidden: Tensor) -> Tensor:
        """log sum_k e^{psi_k}, exact, (...); softmax only."""
        if type(self.noise) is not Gumbel:
            raise ValueError(
                f"The probabilities of the model {self.noise.name!r} are integrals (eq. 5), not e^psi over a "
                "normalizer; use log_prob or topk."
            )
        check_hidden(hidden, self.weight)
        self.check_targets()
        return _predict.log_normalizer(self._flat(hidden), self.weight, self.bias).reshape(hidden.shape[:-1])

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(log p, classes) of the k most probable classes, (..., k) each, best first; exact, in blocks."""
        check_hidden(hidden, self.weight)
        self.check_targets()
        log_p, classes = _predict.topk(self.noise, self._flat(hidden), self.weight, self.bias, k)
        shape = (*hidden.shape[:-1], k)
        return log_p.reshape(shape), classes.reshape(shape)

    @property
    def floored_share(self) -> float:
        """The share of training rows on which `floor` acted, so far. Waits for the device."""
        seen, floored = self.clock.tally[:2].tolist()
        return floored / max(1, seen)

    @property
    def key(self) -> int:
        """The seed of the draws as the kernels take it. Read from the device only after a state was loaded."""
        if self._key is None:
            self._key = _hash.seed_key(int(self.clock.seed))
        return self._key

    def set_learning_rate(self, learning_rate: float) -> None:
        """For schedules; takes effect in a captured CUDA graph too."""
        if self.optimizer is None:
            raise ValueError("This head has no optimizer of its own; set the rate of your torch optimiser instead.")
        self.optimizer.rate.fill_(learning_rate)

    def check_targets(self) -> None:
        """Raise if a target since the last check was out of range. On a GPU such rows are left out when they occur and
        reported here: at log_prob, topk, train(), eval(), state_dict(), or at every call with `debug=True`."""
        count, example = self.clock.tally[2:].tolist()
        if count:
            self.clock.tally[2:] = 0
            raise ValueError(out_of_range(self.n_classes, count, example, self.ignore_index))

    def train(self, mode: bool = True) -> AugmentReduceHead:
        self.check_targets()
        return super().train(mode)

    def get_extra_state(self) -> Tensor:
        """The model's name as bytes, so that weights trained under one model are not used under another."""
        return torch.tensor(list(self.noise.name.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        found = bytes(state.tolist()).decode()
        if found != self.noise.name:
            raise ValueError(
                f"Expected the state of a head with model {self.noise.name!r}, found one of {found!r}: the scores of "
                f"one model mean nothing to another. Construct the head with model={found!r}."
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.check_targets()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape != self.weight.shape:
            raise ValueError(
                f"Expected a state with {self.n_classes} classes and {self.in_features} features, weight "
                f"{tuple(self.weight.shape)}, found {tuple(weight.shape)}. Construct the head with "
                f"in_features={weight.shape[1]}, n_classes={weight.shape[0]}."
            )
        self._key = None  # the seed is in the state, and may be another
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _flat(self, hidden: Tensor) -> Tensor:
        return hidden.reshape(-1, self.in_features)

    def _checked_target(self, hidden: Tensor, target: Tensor) -> Tensor:
        check_hidden(hidden, self.weight)
        self.check_targets()
        y = flat_rows("target", target, hidden, self.weight, integer=True)
        bad = (y < 0) | (y >= self.n_classes)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(out_of_range(self.n_classes, int(bad.sum()), int(y[row]), self.ignore_index, row))
        return y

    def _rows_or_none(self, name: str, value: Tensor | None, hidden: Tensor, *, integer: bool) -> Tensor | None:
        return None if value is None else flat_rows(name, value, hidden, self.weight, integer=integer)

    def _checked_index(self, index: Tensor | None, hidden: Tensor) -> Tensor | None:
        if self.local.mode != "persistent":
            return None
        if index is None:
            raise ValueError(
                'local="persistent" keeps numbers for every training row and needs index, the row numbers of this '
                'minibatch: head(hidden, target, index=rows). Without them, use local="amortised" or "fresh".'
            )
        rows = flat_rows("index", index, hidden, self.weight, integer=True)
        n_rows = len(self.local.visits)
        if rows.device.type == "cpu" and len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < n_rows):
            raise ValueError(f"Expected index in [0, n_rows={n_rows}), found {int(rows.min())} to {int(rows.max())}.")
        return rows

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.n_classes}, model={self.noise.name!r}, bias={self.bias is not None}"


class _Clock(Kept):
    """Where a head is in its random numbers, and what it has counted (see `Step.tally`)."""

    counter: Tensor
    seed: Tensor
    tally: Tensor

    def __init__(self, seed: Tensor, device: torch.device | str | None) -> None:
        super().__init__()
        buffer(self, "counter", torch.zeros(1, dtype=torch.int64, device=device))
        buffer(self, "seed", seed.to(device))
        buffer(self, "tally", torch.zeros(4, dtype=torch.int64, device=device))


def _first_weights(
    noise: Noise, shape: tuple[int, int], bias: bool, class_counts: Tensor | np.ndarray | None, seed: int,
    device: torch.device | str | None, dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Weights as in torch.nn.Linear, made where they live: 10^7 x 512 of them are more than a host may have.

    Biases: log frequencies where these are known and the model's scores are on that scale, else 0.
    """
    weight = torch.empty(shape, device=device, dtype=dtype)
    reach = 1.0 / math.sqrt(shape[1])
    if weight.device.type != "meta":
        weight.uniform_(-reach, reach, generator=torch.Generator(weight.device).manual_seed(seed))
    if not bias:
        return weight, None
    if class_counts is None or not isinstance(noise, Gumbel | Logistic):
        return weight, torch.zeros(shape[0], device=device, dtype=dtype)
    counts = torch.as_tensor(np.asarray(torch.as_tensor(class_counts).cpu()), dtype=torch.float64) + 1.0
    return weight, torch.log(counts / counts.mean()).to(device=device, dtype=weight.dtype)
