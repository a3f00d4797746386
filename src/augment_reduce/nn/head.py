"""`AugmentReduceHead`: the output layer and the loss of a network with very many classes, in one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.noise import Gumbel, Noise, resolve_noise
from ..optim import RowOptimizer
from ..sampling import ClassSampler
from . import _hash, _predict
from ._autograd import BoundLoss
from ._backend import backend_for
from ._checks import check_hidden, check_options, flat_rows
from ._compiled import head_forward, memory_of, number_of, state_of
from ._draw import SharedSampler
from ._exact import ExactLoss, Exactly, traced_loss
from ._fused import FusedOptimizer
from ._guards import check_left_alone_by_ddp, check_may_move, guard_against_others
from ._input import Rows, checked_index, flat_class_weight, rows_of
from ._loading import Loading
from ._local import SECOND_SHARE, Local
from ._place import EveryClass
from ._recompute import Calls
from ._rows import RowUpdate, Settings, first_weights, on_host
from ._sharded_step import ShardedStep, of_all_ranks, refuse_compilers, sharded_exact_loss, sharing_errors
from ._shards import OwnClasses, shards_of
from ._smoothing import ClassMean
from ._state import Clock
from ._step import Step
from ._targets import out_of_range

BOUND_NODES = 20  # Gauss-Hermite nodes of the bound in evaluation


class AugmentReduceHead(Loading):
    """A linear layer over K classes with its loss, trained at a cost that does not grow with K.

        head = AugmentReduceHead(512, 1_000_000, class_counts=counts, optimizer="adagrad")
        loss = head(hidden, target)            # train(): minus a lower bound on log p, from sampled classes
        loss.backward()                        # gradient to hidden; with an optimizer, updates the weights
        head.eval()(hidden, target)            # the exact loss, over all classes in blocks
        head.log_prob(hidden, target), head.topk(hidden, 10)
        head(hidden)                           # logits of all classes, as of nn.Linear

    `from_linear` and `to_linear` convert from and to an nn.Linear with the same weights. In train() the loss is
    unbiased for minus the bound of eq. (7) or (8), and so are its gradients, with the local parameters fixed.

    - `model`: "softmax", "probit", "logistic", or a `Noise`;
    - `n_sampled_classes`: |S|, shared by the minibatch; `class_sampling`: how they are drawn (`nn/_draw.py`). By
      default "stratified-shared" with `class_counts` (K,), the training rows of each class, else "uniform-shared";
    - `in_batch`: use the labels of the other rows as sampled classes, too (`nn/_columns.py`). Default: True with
      `class_counts`. The rows of a minibatch must be independent draws of the rows that were counted; rows that are
      not, as tokens of one sequence, have the same number in `group`. Rows (B, T, D) are B groups by default;
    - `local`: how q of each row is computed (`nn/_local.py`): "amortised", "log-sum-exp", "persistent" (needs `n_rows`,
      and `index` at every call) or "fresh", corrected by a second sample. By default "log-sum-exp" for a softmax with
      `in_batch`, else "amortised";
    - `optimizer`: None gives weight and bias dense gradients (`sparse_grad=True`: row-sparse ones), for a torch
      optimiser. "adagrad", "rowwise-adagrad", "adam" or an object of `augment_reduce.optim` updates the touched rows in
      the backward pass, once a step, with `learning_rate`, `weight_decay`, `max_norm` and `initial_accumulator_value`
      (`nn/_rows.py`); `fused_optimizer` is its torch.optim.Optimizer, for schedulers and accumulation. The weights'
      `.grad` stays None, so that another torch optimiser does not change them; `requires_grad_(False)` freezes them.
      Rows that are not finite, and steps whose upstream gradient is not, are skipped: `skipped_rows` counts them;
    - `class_weight` (K,), `label_smoothing`, as of torch.nn.CrossEntropyLoss; `z_loss`: z adds z (log Z)^2 to the loss
      of a softmax;
    - `floor`: clips the gradient of rows whose local parameter is far too low: its negative part is at most e^floor
      times that at the sample's own estimate. Clipped rows are biased; `floored_share` is their share. The value of the
      loss is not clipped. None: no floor; 0: sampled softmax;
    - `n_nodes`: for models other than softmax; 1: one random node of q(v) a row and step, more: Gauss-Hermite nodes;
    - `debug`: check targets at every call on a GPU too, which synchronises;
    - `process_group`: a ProcessGroup, or a DeviceMesh of one dimension, whose ranks share the classes; `exchange` and
      `trunk_gradients` select what they send, `sync=True` waits for every sum over classes (`nn/_shards.py`,
      `nn/_late.py`, docs/distributed.md);
    - `generator`: a CPU generator, for the initial weights and for the seed of all draws.
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
        in_batch: bool | None = None,
        local: str | None = None,
        n_rows: int | None = None,
        bias: bool = True,
        optimizer: str | RowOptimizer | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        initial_accumulator_value: float = 0.0,
        sparse_grad: bool = False,
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        floor: float | None = 1.0,
        n_nodes: int = 1,
        reduction: str = "mean",
        ignore_index: int = -100,
        debug: bool = False,
        process_group: Any = None,
        exchange: str | None = None,
        trunk_gradients: str | None = None,
        sync: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.noise = resolve_noise(model)
        softmax = type(self.noise) is Gumbel
        check_options(in_features, reduction, floor, label_smoothing, z_loss, softmax, class_weight is not None)
        settings = Settings(weight_decay, max_norm, initial_accumulator_value)
        if optimizer is None and (learning_rate is not None or settings != Settings()):
            raise ValueError(
                f"learning_rate={learning_rate} and {settings} are for the head's own row optimiser, but optimizer is "
                'None. Pass optimizer="adagrad", or give them to your torch optimiser.'
            )
        self.in_features, self.n_classes = in_features, n_classes
        self.shards = shards_of(process_group, n_classes, softmax, exchange, trunk_gradients, sync)
        n_own = n_classes if self.shards is None else len(self.shards.layout)
        self.reduction, self.ignore_index, self.floor = reduction, ignore_index, floor
        self.sparse_grad, self.debug = sparse_grad, debug
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        device = torch.get_default_device() if device is None else torch.device(device)
        size = min(n_classes, 1024) if n_sampled_classes is None else n_sampled_classes
        self.sampler = SharedSampler(n_classes, size, class_sampling, class_counts, device=device)
        every = self.sampler.n_certain == n_classes  # then the second sample is exact
        self.in_batch = self._resolved_in_batch(in_batch, every)
        if local is None:
            local = "log-sum-exp" if softmax and self.in_batch else "amortised"
        self.local = Local(
            self.noise, in_features, n_classes, local, n_rows=n_rows, n_nodes=n_nodes, device=device,
            second_share=1.0 if every else SECOND_SHARE,
        )  # fmt: skip
        self.class_mean = ClassMean(in_features, n_classes, device) if label_smoothing else None
        seed = self._seeds(generator)
        self._weight_seed = seed[1]
        self._class_counts = None if class_counts is None else on_host(class_counts)
        self.weight = nn.Parameter(torch.empty(n_own, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n_own, device=device, dtype=dtype)) if bias else None
        layout = None if self.shards is None else self.shards.layout
        self.optimizer = (
            RowUpdate(optimizer, learning_rate, self.weight, self.bias, settings, layout)
            if optimizer is not None
            else None
        )
        self.class_weight: Tensor | None
        weights = None if class_weight is None else flat_class_weight(class_weight, n_classes).to(device)
        self.register_buffer("class_weight", weights, persistent=False)
        self.clock = Clock(seed[0], device)
        self._key: int | None = _hash.seed_key(seed[0])
        self._calls, self._skipped_told = Calls(), 0
        self._number = number_of(self)
        if self.shards is not None:
            self.shards.agree(self)
        self.reset_parameters()

    def _resolved_in_batch(self, in_batch: bool | None, every: bool) -> bool:
        """Whether labels are added: only with class counts, and if not all classes are drawn."""
        if in_batch and not self.sampler.knows_shares:
            raise ValueError(
                "in_batch=True needs class_counts, the (n_classes,) number of training rows of each class "
                "(torch.bincount(targets, minlength=n_classes)): how often a class is a label is part of its weight."
            )
        return self.sampler.knows_shares and not every if in_batch is None else in_batch and not every

    def _seeds(self, generator: torch.Generator | None) -> list[int]:
        """Seeds of the draws and of the initial weights. Ranks without a generator use those of rank 0."""
        seeds = torch.randint(2**63 - 1, (2,), generator=generator, device="cpu")
        return (seeds if self.shards is None else self.shards.agreed_seeds(seeds, generator is None)).tolist()

    def reset_parameters(self) -> None:
        """Reset weights, biases, local parameters, optimiser state and counters to their initial values."""
        for part in (self.sampler, self.local, self.class_mean, self.optimizer, self.clock):
            if part is not None and not part.is_meta:
                part.reset_buffers()
        self._key, self._skipped_told = _hash.seed_key(self.clock.first_seed), 0
        if self.shards is not None:
            self.shards.unsettled = self.shards.last_loss = None
        if not self.weight.is_meta:
            layout = None if self.shards is None else self.shards.layout
            first_weights(self.noise, self.weight, self.bias, self._class_counts, self._weight_seed, layout)

    @classmethod
    def from_linear(cls, linear: nn.Linear, model: str | Noise = "softmax", **settings: Any) -> AugmentReduceHead:
        """A head that shares the weights of this layer, on the same device. `settings` are those of the constructor;
        numbers of features and classes and the bias are the layer's. With a process_group it has a copy of the rank's
        own rows of a layer that is the same on every rank."""
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
            if head.shards is not None:
                parameter = nn.Parameter(head.shards.layout.of(parameter.detach()).clone(), parameter.requires_grad)
            head.register_parameter(name, parameter)
        for part in head.children():
            part.to_empty(device=linear.weight.device)
        return head.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """An nn.Linear that shares the weights: for export, or for code that supports nn.Linear only. With a
        process_group a copy with the rows of all ranks, on every rank."""
        linear = nn.Linear(self.in_features, self.n_classes, bias=self.bias is not None, device="meta")
        for name, parameter in self.named_parameters(recurse=False):
            if self.shards is not None:
                parameter = nn.Parameter(self.shards.whole(parameter.detach()), parameter.requires_grad)
            linear.register_parameter(name, parameter)
        return linear.train(self.training)

    def forward(
        self, hidden: Tensor, target: Tensor | None = None, *, index: Tensor | None = None,
        sample_weight: Tensor | None = None, target_prob: Tensor | None = None, group: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The loss, reduced: in train() minus the bound from sampled classes, in eval() exact. Without a target
        `logits(hidden)`.

        hidden (..., D), target (...), index (...) numbers of training rows for "persistent", sample_weight (...), group
        (...) for in-batch labels. A row with target `ignore_index` is ignored; "mean" divides by the weights of the
        rows that count (0 if there is none). A row of hidden that is not finite has the loss NaN and no update.
        Soft targets: target (..., M) classes with probabilities target_prob (..., M).
        """
        if target is None:
            if not (index is None and sample_weight is None and target_prob is None and group is None):
                raise ValueError("index, sample_weight, target_prob and group are about a loss, which needs a target.")
            return self.logits(hidden)
        if self.shards is not None:
            check_left_alone_by_ddp(self)
        with sharing_errors(self) as shared:
            check_hidden(hidden, self.weight)
            shared.rows = rows = rows_of(self, hidden, target, index, sample_weight, target_prob, group)
        if self.training:
            loss = self._sampled_loss(rows, target, shared.sizes)
        else:
            loss = self._exact_loss(rows, shared.sizes)
        if self.debug:
            self.check_targets()
        return rows.shaped(loss, self.reduction)

    def _exact_loss(self, rows: Rows, sizes: list[int] | None = None) -> Tensor:
        self.check_targets()
        y, counts = self._checked_labels(rows.target)
        what = Exactly(
            self.noise, y, self._row_weight(rows, counts), rows.reduction, self.optimizer is None,
            self.label_smoothing, self.z_loss,
        )  # fmt: skip
        if self.shards is not None and sizes is not None:
            return sharded_exact_loss(self.shards, sizes, rows.hidden, self.weight, self.bias, what)
        if torch.compiler.is_compiling():
            return traced_loss(rows.hidden, self.weight, self.bias, what)
        return ExactLoss.apply(rows.hidden, self.weight, self.bias, what)

    def _row_weight(self, rows: Rows, counts: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(rows.hidden.dtype, self.weight.dtype), torch.float32)
        if rows.sample_weight is None:
            return counts.to(dtype)
        return torch.where(counts, rows.sample_weight.to(dtype), 0.0)

    def _sampled_loss(self, rows: Rows, target: Tensor, sizes: list[int] | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            refuse_compilers(self.shards)
            return self._compiled_loss(rows)
        step = self._step(rows)
        repeated = self._calls.repeated(rows.hidden, target, self.training)
        if repeated is not None:  # by torch.utils.checkpoint
            step.counter = step.counter - (self._calls.number - repeated.number)
            step.tally, step.gauge = torch.zeros_like(step.tally), None
            step.parts, step.learn = repeated.used, step.learn and not repeated.learned
        step.transformed = torch._C._are_functorch_transforms_active()
        backend: Any = backend_for(step, rows.hidden, self.weight)
        if self.shards is not None and sizes is not None:
            backend = ShardedStep(self.shards, sizes)
        loss = BoundLoss.apply(rows.hidden, self.weight, self.bias, step, backend)
        if repeated is None:
            self._calls.add(rows.hidden, target, step, self.training)
        if step.skipped is not None:
            step.skipped()
        return loss

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all classes (..., K), hidden W' + b, with gradients as of nn.Linear. With a fused optimiser for
        evaluation only: a gradient by the weights would be lost."""
        if self.training and torch.is_grad_enabled() and self.optimizer is not None and self._is_trainable():
            raise ValueError(
                "The logits of a head with an optimizer of its own carry no gradient to its weights, so a loss of "
                "them would not train it. Train with head(hidden, target); for logits call eval(), or torch.no_grad()."
            )
        check_hidden(hidden, self.weight)
        if self.shards is not None:
            if torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad):
                raise ValueError(
                    "The logits of a head whose classes are on several ranks carry no gradient. Call them under "
                    "torch.no_grad(), and train with head(hidden, target)."
                )
            psi = self._of_all_ranks(lambda h: _predict.whole_scores(h, self._place), self._flat(hidden))
            return psi.to(self.weight.dtype).reshape(*hidden.shape[:-1], self.n_classes)
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    @property
    def _place(self) -> EveryClass:
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        return EveryClass(weight, bias) if self.shards is None else OwnClasses(self.shards, weight, bias)

    def _of_all_ranks(self, answer: Callable[..., Any], *rows: Tensor) -> Any:
        """`answer` for these rows; over ranks, the own part of the answer for the rows of all ranks."""
        return answer(*rows) if self.shards is None else of_all_ranks(self.shards, answer, *rows)

    def _compiled_loss(self, rows: Rows) -> Tensor:
        """As `_sampled_loss`, by custom operators for compilers (`nn/_compiled.py`)."""
        state = state_of(self)
        loss, _, after = head_forward(
            rows.hidden, self.weight, self.bias, rows.target, rows.sample_weight, rows.index, rows.group, state,
            memory_of(self), self._number, rows.reduction, rows.one_label, self.training and torch.is_grad_enabled(),
        )  # fmt: skip
        with torch.no_grad():
            for value, new in zip(state, after, strict=True):
                value.copy_(new)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = number_of(self)

    def _step(self, rows: Rows, learn: bool | None = None) -> Step:
        """The step for these rows."""
        training = (self.training and torch.is_grad_enabled()) if learn is None else learn
        moves = training and self.optimizer is not None and self._is_trainable()
        if moves:
            assert self.optimizer is not None
            check_may_move(self, self.optimizer.follows, 1 if self.shards is None else self.shards.ranks.size)
            for name, parameter in self.optimizer.follows.items():
                guard_against_others(name, parameter)
        return Step(
            noise=self.noise,
            target=rows.target,
            sampler=self.sampler,
            local=self.local,
            key=self.key,
            counter=self.clock.counter,
            tally=self.clock.tally,
            gauge=self.clock.gauge,
            sample_weight=rows.sample_weight,
            index=rows.index,
            group=rows.group,
            in_batch=self.in_batch and rows.one_label,
            class_mean=self.class_mean,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            floor=self.floor,
            ignore_index=self.ignore_index,
            reduction=rows.reduction,
            learn=training,
            sparse=self.sparse_grad,
            update=self.optimizer if moves else None,
            gives_weight_gradients=self.optimizer is None,
            skipped=self._say_skipped if self.weight.device.type == "cpu" else None,
        )

    def _is_trainable(self) -> bool:
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    def log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """log p(target | hidden), exact, (...): over all classes, in blocks; 0 if the target is `ignore_index`.
        No gradient."""
        with sharing_errors(self):
            y, counts = self._checked_target(hidden, target)
        found = self._of_all_ranks(lambda h, y: _predict.log_prob(self.noise, h, self._place, y), self._flat(hidden), y)
        return torch.where(counts, found, 0.0).reshape(target.shape)

    @torch.no_grad()
    def log_prob_bound(self, hidden: Tensor, target: Tensor, index: Tensor | None = None) -> Tensor:
        """The full bound on `log_prob` with the q of training; the difference is the loss due to the local step.

        "fresh" uses its prediction, without the correction by a second sample. 0 if the target is `ignore_index`.
        """
        with sharing_errors(self):
            y, counts = self._checked_target(hidden, target)
            index = checked_index(self, index, hidden)
        self.settle()
        rows = (_predict.in_float(self._flat(hidden), self.weight), y, *(() if index is None else (index,)))

        def bound(h: Tensor, y: Tensor, index: Tensor | None = None) -> Tensor:
            psi_y, _ = self._place.label_scores(h, y, slice(None))
            parts = self.local.recall(self.local.predict(h, psi_y), index)
            nodes = self.local.nodes(parts, self.key, self.clock.counter[0], BOUND_NODES)
            return _predict.bound(self.noise, h, self._place, y, psi_y, nodes)

        found = self._of_all_ranks(bound, *rows)
        return torch.where(counts, found, 0.0).reshape(target.shape)

    def log_normalizer(self, hidden: Tensor) -> Tensor:
        """log sum_k e^{psi_k}, exact, (...); softmax only."""
        if type(self.noise) is not Gumbel:
            raise ValueError(
                f"The probabilities of the model {self.noise.name!r} are integrals (eq. 5), not e^psi over a "
                "normalizer; use log_prob or topk."
            )
        with sharing_errors(self):
            check_hidden(hidden, self.weight)
            self.check_targets()
        found = self._of_all_ranks(lambda h: _predict.log_normalizer(h, self._place), self._flat(hidden))
        return found.reshape(hidden.shape[:-1])

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(log p, classes) of the k most probable classes, (..., k) each, best first; exact, in blocks."""
        with sharing_errors(self):
            check_hidden(hidden, self.weight)
            self.check_targets()
        log_p, classes = self._of_all_ranks(lambda h: _predict.topk(self.noise, h, self._place, k), self._flat(hidden))
        shape = (*hidden.shape[:-1], k)
        return log_p.reshape(shape), classes.reshape(shape)

    @property
    def key(self) -> int:
        """The seed of the draws for the kernels. Read from the device only after a state was loaded."""
        if self._key is None:
            self._key = _hash.seed_key(int(self.clock.seed))
        return self._key

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate, also of a captured CUDA graph."""
        if self.optimizer is None:
            raise ValueError("This head has no optimizer of its own; set the rate of your torch optimiser instead.")
        self.optimizer.group["lr"] = learning_rate

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The head's row optimiser as a torch.optim.Optimizer (`nn/_fused.py`); `param_groups[0]["lr"]` is its rate.
        Rows are updated in the backward pass; once its `zero_grad()` or `step()` was called, in `step()`."""
        if self.optimizer is None:
            raise ValueError(
                'This head has no optimizer of its own. Construct it with optimizer="adagrad", "rowwise-adagrad" or '
                '"adam"; or give head.parameters() to a torch optimiser.'
            )
        return FusedOptimizer(self.optimizer)

    def train(self, mode: bool = True) -> AugmentReduceHead:
        self.settle()
        self.check_targets()
        return super().train(mode)

    def _flat(self, hidden: Tensor) -> Tensor:
        return hidden.reshape(-1, self.in_features)

    def _checked_target(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(labels, which of them count): a target equal to `ignore_index` is label 0 and does not count."""
        check_hidden(hidden, self.weight)
        self.check_targets()
        return self._checked_labels(flat_rows("target", target, hidden, self.weight, integer=True))

    def _checked_labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        counts = y != self.ignore_index
        bad = counts & ((y < 0) | (y >= self.n_classes))
        if not torch.compiler.is_compiling() and bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(out_of_range(self.n_classes, int(bad.sum()), int(y[row]), self.ignore_index, row))
        return torch.where(counts, y, 0), counts

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.n_classes}, model={self.noise.name!r}, bias={self.bias is not None}"
