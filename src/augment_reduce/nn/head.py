"""`AugmentReduceHead`: the output layer and the loss of a network with very many classes, in one module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..noise import Gumbel, Noise, resolve_noise
from ..optim import RowOptimizer
from ..sampler import ClassSampler
from . import _hash, _predict
from ._backend import backend_for
from ._checks import check_hidden, check_reduction, check_sample_weight, flat_rows
from ._draw import SharedSampler
from ._guards import check_may_move
from ._local import SECOND_SHARE, Local
from ._recompute import Calls
from ._rows import RowUpdate, first_weights, on_host
from ._state import Clock
from ._step import BAD_TARGET, BAD_TARGETS, BAD_WEIGHTS, FLOORED, ROWS, SKIPPED, BoundLoss, Step, out_of_range

BOUND_NODES = 20  # Gauss-Hermite nodes where the bound is reported rather than trained on


class AugmentReduceHead(nn.Module):
    """A linear layer over K classes with its loss, trained at a cost that does not grow with K.

        head = AugmentReduceHead(512, 1_000_000, class_counts=counts, optimizer="adagrad")
        loss = head(hidden, target)            # training: negative lower bound on log p, from sampled classes
        loss.backward()                        # gradient to hidden; with an optimizer, the weights move here
        head.log_prob(hidden, target)          # evaluation: exact, over all classes in blocks
        head.topk(hidden, 10)
        head(hidden)                           # logits of all classes, as of nn.Linear

    `from_linear` and `to_linear` exchange it for an nn.Linear with the same weights. The loss is unbiased for minus the
    bound of eq. (7) or (8), and so are its gradients, the local parameters held.

    - `model`: "softmax", "probit", "logistic", or a `Noise`;
    - `n_sampled_classes`: |S|, shared by the minibatch; `class_sampling`: how they are drawn (`nn/_draw.py`). By
      default "stratified-shared" with `class_counts` (K,), the training rows of each class, else "uniform-shared";
    - `local`: where each row's q comes from (`nn/_local.py`): "amortised", "persistent" (needs `n_rows`, and `index` at
      every call) or "fresh", corrected by a second sample;
    - `optimizer`: None gives weight and bias row-sparse gradients (`sparse_grad=False`: dense ones), for a torch
      optimiser of yours. "adagrad", "rowwise-adagrad", "adam" or an object of `augment_reduce.optim` lets the backward
      pass itself move the touched rows, once a step. Their `.grad` stays None, so that a torch optimiser that is given
      them leaves them alone; `requires_grad_(False)` freezes them. Rows that are not finite, and steps whose upstream
      gradient is not, move nothing: `skipped_rows` counts them, and a RuntimeWarning says so;
    - `floor`: a safeguard against a local parameter that is far too low for its row: no row's negative part counts more
      than e^floor times what it should. Where it acts the gradient is biased; `floored_share` says how often. None is
      off, 0 is sampled softmax;
    - `n_nodes`: for models other than softmax, 1 draws one value of q(v) a row and step, more are Gauss-Hermite nodes;
    - `debug`: check targets at every call on a GPU too, which makes the host wait for it;
    - `generator`: a CPU generator, for the first weights and for the seed of all later draws.
    """

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
        device = torch.get_default_device() if device is None else torch.device(device)
        size = min(n_classes, 1024) if n_sampled_classes is None else n_sampled_classes
        self.sampler = SharedSampler(n_classes, size, class_sampling, class_counts, device=device)
        every = self.sampler.n_certain == n_classes  # the second sample is exact then
        self.local = Local(
            self.noise, in_features, n_classes, local, n_rows=n_rows, n_nodes=n_nodes, device=device,
            second_share=1.0 if every else SECOND_SHARE,
        )  # fmt: skip
        seed = torch.randint(2**63 - 1, (2,), generator=generator, device="cpu").tolist()
        self._weight_seed = seed[1]
        self._class_counts = None if class_counts is None else on_host(class_counts)
        self.weight = nn.Parameter(torch.empty(n_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n_classes, device=device, dtype=dtype)) if bias else None
        self.optimizer = RowUpdate(optimizer, learning_rate, self.weight, self.bias) if optimizer is not None else None
        self.clock = Clock(seed[0], device)
        self._key: int | None = _hash.seed_key(seed[0])
        self._calls, self._skipped_told = Calls(), 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All that training changes as it was in the beginning: weights, biases, local parameters, optimiser, clock."""
        for part in (self.sampler, self.local, self.optimizer, self.clock):
            if part is not None and not part.is_meta:
                part.reset_buffers()
        self._key, self._skipped_told = _hash.seed_key(self.clock.first_seed), 0
        if not self.weight.is_meta:
            first_weights(self.noise, self.weight, self.bias, self._class_counts, self._weight_seed)

    @classmethod
    def from_linear(cls, linear: nn.Linear, model: str | Noise = "softmax", **settings: Any) -> AugmentReduceHead:
        """A head in place of this layer: the same weights in the same memory, on the same device. `settings` are those
        of the constructor; the layer says how many features and classes there are, and whether there is a bias."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"Expected an nn.Linear, found {type(linear).__name__}. Construct AugmentReduceHead(in_features, "
                "n_classes), and give it the weight: head.weight = layer.weight."
            )
        taken = {"bias", "device", "dtype"} & settings.keys()
        if taken:
            raise ValueError(f"Expected no {', '.join(sorted(taken))}: the layer has them. Change the layer first.")
        head = cls(
            linear.in_features, linear.out_features, model, bias=linear.bias is not None, device="meta",
            dtype=linear.weight.dtype, **settings,
        )  # fmt: skip
        for name, parameter in linear.named_parameters(recurse=False):
            head.register_parameter(name, parameter)
        for part in head.children():
            part.to_empty(device=linear.weight.device)
        return head.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """An nn.Linear with the same weights, in the same memory: for export, or for what knows nn.Linear only."""
        linear = nn.Linear(self.in_features, self.n_classes, bias=self.bias is not None, device="meta")
        for name, parameter in self.named_parameters(recurse=False):
            linear.register_parameter(name, parameter)
        return linear.train(self.training)

    def forward(
        self, hidden: Tensor, target: Tensor | None = None, *, index: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The training loss: minus the bound, reduced. Without a target `logits(hidden)`.

        hidden (..., D), target (...), index (...) numbers of training rows for "persistent", sample_weight (...). A
        target equal to `ignore_index` leaves its row out; "mean" divides by the weights of the rows that count (0 where
        none does). A row of hidden that is not finite has the loss NaN and moves nothing."""
        if target is None:
            if index is not None or sample_weight is not None:
                raise ValueError("index and sample_weight are about a loss, which needs a target.")
            return self.logits(hidden)
        check_hidden(hidden, self.weight)
        step = self._step(hidden, target, index, sample_weight)
        repeated = self._calls.repeated(hidden, target, self.training)
        if repeated is not None:  # by torch.utils.checkpoint
            step.counter = step.counter - (self._calls.number - repeated.number)
            step.tally = torch.zeros_like(step.tally)
            step.parts, step.learn = repeated.used, step.learn and not repeated.learned
        backend = backend_for(step, hidden, self.weight)
        loss = BoundLoss.apply(hidden.reshape(-1, self.in_features), self.weight, self.bias, step, backend)
        if repeated is None:
            self._calls.add(hidden, target, step, self.training)
        if step.skipped is not None:
            step.skipped()
        if self.debug:
            self.check_targets()
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all classes (..., K), hidden W' + b, with gradients as of nn.Linear. A head that moves its weights
        itself has them for evaluation only: a gradient by its weights would be lost."""
        if self.training and torch.is_grad_enabled() and self.optimizer is not None and self._is_trainable():
            raise ValueError(
                "The logits of a head with an optimizer of its own carry no gradient to its weights, so a loss of "
                "them would not train it. Train with head(hidden, target); for logits call eval(), or torch.no_grad()."
            )
        check_hidden(hidden, self.weight)
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    def _step(self, hidden: Tensor, target: Tensor, index: Tensor | None, sample_weight: Tensor | None) -> Step:
        """What is to be done with these rows."""
        training = self.training and torch.is_grad_enabled()
        moves = training and self.optimizer is not None and self._is_trainable()
        if moves:
            assert self.optimizer is not None
            check_may_move(self, self.optimizer.follows)
        weights = (
            None
            if sample_weight is None
            else flat_rows("sample_weight", sample_weight, hidden, self.weight, integer=False)
        )
        if weights is not None:
            check_sample_weight(weights)
        return Step(
            noise=self.noise,
            target=flat_rows("target", target, hidden, self.weight, integer=True),
            sampler=self.sampler,
            local=self.local,
            key=self.key,
            counter=self.clock.counter,
            tally=self.clock.tally,
            sample_weight=weights,
            index=self._checked_index(index, hidden),
            floor=self.floor,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            learn=training,
            sparse=self.sparse_grad,
            update=self.optimizer if moves else None,
            gives_weight_gradients=self.optimizer is None,
            skipped=self._say_skipped if self.weight.device.type == "cpu" else None,
        )

    def _is_trainable(self) -> bool:
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    def log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """log p(target | hidden), exact, (...): over all classes, in blocks; 0 where the target is `ignore_index`.
        No gradient."""
        y, counts = self._checked_target(hidden, target)
        found = _predict.log_prob(self.noise, self._flat(hidden), self.weight, self.bias, y)
        return torch.where(counts, found, 0.0).reshape(target.shape)

    @torch.no_grad()
    def log_prob_bound(self, hidden: Tensor, target: Tensor, index: Tensor | None = None) -> Tensor:
        """The bound on `log_prob` that training goes by, with every class in it: how much is lost to the local step.

        "fresh" uses what is deterministic of it, the prediction that the second sample would correct. 0 where the
        target is `ignore_index`.
        """
        y, counts = self._checked_target(hidden, target)
        h = _predict.in_float(self._flat(hidden), self.weight)
        psi_y, _ = _predict.label_scores(h, self.weight, self.bias, y)
        parts = self.local.recall(self.local.predict(h, psi_y), self._checked_index(index, hidden))
        nodes = self.local.nodes(parts, self.key, self.clock.counter[0], BOUND_NODES)
        found = _predict.bound(self.noise, h, self.weight, self.bias, y, nodes)
        return torch.where(counts, found, 0.0).reshape(target.shape)

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
        tally = self.clock.tally.tolist()
        return tally[FLOORED] / max(1, tally[ROWS])

    @property
    def skipped_rows(self) -> int:
        """How many rows moved nothing because their hidden values, their scores or the gradient that came from above
        were not finite (or beyond 1e15). Waits for the device."""
        return int(self.clock.tally[SKIPPED])

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
        """Raise if a target or a sample weight since the last check was out of range. On a GPU such rows are left out
        when they occur and reported here: at log_prob, topk, train(), eval(), or at every call with `debug=True`;
        state_dict() warns. Warns of rows that were skipped, too."""
        if self.clock.is_meta:
            return
        self._say_skipped()
        problem = self._bad_input()
        if problem is not None:
            self.clock.tally[BAD_TARGETS : BAD_TARGET + 1] = 0
            self.clock.tally[BAD_WEIGHTS] = 0
            raise ValueError(problem)

    def _bad_input(self) -> str | None:
        tally = self.clock.tally.tolist()
        if tally[BAD_TARGETS]:
            return out_of_range(self.n_classes, tally[BAD_TARGETS], tally[BAD_TARGET], self.ignore_index)
        if tally[BAD_WEIGHTS]:
            return (
                f"Expected sample_weight to be below 1e15 and not negative, but {tally[BAD_WEIGHTS]} were "
                "not. A weight of 0 leaves a row out."
            )
        return None

    def _say_skipped(self) -> None:
        """A warning with the number of rows skipped since the last one."""
        count = self.skipped_rows
        new, self._skipped_told = count - self._skipped_told, count
        if new > 0:
            warnings.warn(
                f"{new} rows were skipped: their hidden values, their scores or the gradient of the loss were not "
                "finite, or beyond 1e15. They moved neither weights nor local parameters. If it happens again, look "
                "for what overflows in the network: a lower learning rate, gradient clipping, bfloat16 in place of "
                "float16.",
                RuntimeWarning,
                stacklevel=3,
            )

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
        """As of any module. Bad targets of a GPU are a warning here: a checkpoint must not fail because of them."""
        problem = None if self.clock.is_meta else self._bad_input()
        if problem is not None:
            warnings.warn(f"{problem} Such rows were left out; train() and check_targets() raise.", stacklevel=2)
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
        self._calls, self._skipped_told = Calls(), 0
        super()._load_from_state_dict(state_dict, prefix, *args)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """The head's optimizer moves the parameters that are registered, also those given later (a tied weight)."""
        super().register_parameter(name, param)
        self._follow()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        followed = self._is_followed()
        result = super()._apply(fn, recurse)
        if followed:
            self._follow()  # `to_empty` on another kind of device makes new parameters
        return result

    def _follow(self) -> None:
        optimizer = self._modules.get("optimizer")
        if isinstance(optimizer, RowUpdate):
            # Old weight_norm and the like delete a parameter before they register their own: then there is none.
            optimizer.follows = {name: self._parameters.get(name) for name in ("weight", "bias")}

    def _is_followed(self) -> bool:
        return self.optimizer is not None and all(
            self._parameters.get(name) is parameter for name, parameter in self.optimizer.follows.items()
        )

    def _flat(self, hidden: Tensor) -> Tensor:
        return hidden.reshape(-1, self.in_features)

    def _checked_target(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(labels, which of them count): a target equal to `ignore_index` is label 0 and does not count."""
        check_hidden(hidden, self.weight)
        self.check_targets()
        y = flat_rows("target", target, hidden, self.weight, integer=True)
        counts = y != self.ignore_index
        bad = counts & ((y < 0) | (y >= self.n_classes))
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(out_of_range(self.n_classes, int(bad.sum()), int(y[row]), self.ignore_index, row))
        return torch.where(counts, y, 0), counts

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
