"""Hugging Face transformers: the output layer of a `*ForCausalLM` or `*ForSequenceClassification` becomes a head.

    from augment_reduce.integrations.transformers import patch

    model = patch(AutoModelForCausalLM.from_pretrained(name), class_counts=token_counts)
    Trainer(model, ...).train()              # no logits in training; evaluation is unchanged
    model.save_pretrained(folder)            # loads anywhere, patched or not

The model keeps its class name, weights and identity; only `forward` differs, and only in train() with labels: the
output layer is replaced by an identity that captures its input, from which the head computes the loss.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..model.noise import Noise
from ..nn import AugmentReduceHead

CLASSIFIERS = ("classifier", "score")
CHANGED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
CAUSAL, SEQUENCE = "ForCausalLM", "ForSequenceClassification"
OLD_NAMES = {CAUSAL: "LMHeadModel", SEQUENCE: "ForSequenceClassification"}


def patch(model: Any, *, noise: str | Noise = "softmax", **settings: Any) -> Any:
    """Replace the output layer by an `AugmentReduceHead` with these `settings`, in place; returns the model.

    Pass `class_counts` (K,), the number of training rows of each token or label: without it classes are drawn
    uniformly, without the labels of other rows. With an `optimizer` the head's rows are updated in the backward pass
    and not by the trainer's optimiser; tied weights need `optimizer=None`.
    """
    kind, name = _kind_of(model), _layer_of(model)
    layer = getattr(model, name)
    if isinstance(layer, AugmentReduceHead):
        raise ValueError(f"{type(model).__name__}.{name} is a head already; unpatch(model) gives the layer back.")
    if not isinstance(layer, nn.Linear):
        raise TypeError(
            f"Expected {type(model).__name__}.{name} to be an nn.Linear, found {type(layer).__name__}. A classifier of "
            "several layers can be patched by hand: replace its last one, and call it with labels."
        )
    _check_plain_logits(model)
    if settings.get("optimizer") is not None and _is_tied(model, layer):
        raise ValueError(
            f"{type(model).__name__} ties {name}.weight to its embedding, which the network's optimiser moves; a head "
            "with an optimizer of its own would move it, too. Use optimizer=None."
        )
    setattr(model, name, AugmentReduceHead.from_linear(layer, noise, **settings))
    base: Any = type(model)
    model.__class__ = patched_class(base, kind, name)
    return model


def unpatch(model: Any) -> Any:
    """Restore the output layer, with the current weights."""
    if not isinstance(model, Patched):
        raise ValueError(f"Expected a patched model, found {type(model).__name__}.")
    name, base = model._head_name, model._base
    setattr(model, name, getattr(model, name).to_linear())
    model.__class__ = base
    return model


class Patched:
    """Mixin of the class of a patched model."""

    _base: type
    _head_name: str
    _kind: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self._base, self._kind, self._head_name), self.__dict__

    def _loss_of(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a training pass, with the head's loss and without logits."""
        head: AugmentReduceHead = getattr(self, self._head_name)
        labels, n_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        labels = kwargs.pop("shift_labels", None) if labels is None else labels
        as_tuple = kwargs.pop("return_dict", None) is False
        captured = _Captured(head)
        self._modules[self._head_name] = captured  # type: ignore[attr-defined]
        try:
            found = original(self, *args, **kwargs, return_dict=True)
        finally:
            self._modules[self._head_name] = head  # type: ignore[attr-defined]
        rows = found.logits
        _check_rows(self, head, captured, rows)
        if self._kind == CAUSAL:
            rows, labels = rows[:, :-1], labels[:, 1:]
        loss = _mean_over(head, rows.contiguous(), labels.to(rows.device), n_items)
        found = type(found)(loss=loss, **{name: value for name, value in found.items() if name != "logits"})
        return found.to_tuple() if as_tuple else found


class _Captured(nn.Module):
    """Replaces the output layer in training: returns its input."""

    def __init__(self, head: AugmentReduceHead) -> None:
        super().__init__()
        self.__dict__["head"] = head  # not a submodule: nothing is registered twice
        self.seen: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.__dict__["head"].weight

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return hidden


def _mean_over(head: AugmentReduceHead, rows: Tensor, labels: Tensor, n_items: Any) -> Tensor:
    """The mean of the head's loss; with gradient accumulation divided by the number of rows of all micro-batches."""
    if n_items is None:
        return head(rows, labels)
    kept, head.reduction = head.reduction, "sum"
    try:
        return head(rows, labels) / n_items
    finally:
        head.reduction = kept


def _check_rows(model: Any, head: AugmentReduceHead, captured: _Captured, rows: Tensor) -> None:
    """Check once that the network returns rows of the captured hidden states, unchanged."""
    if getattr(model, "_rows_checked", False):
        return
    seen = captured.seen
    fits = seen is not None and rows.shape[-1] == head.in_features
    if fits and rows is not seen:
        assert seen is not None
        flat = seen.to(rows.dtype).reshape(-1, head.in_features)
        some = rows.reshape(-1, head.in_features)[:4]
        fits = all(bool((flat == row).all(dim=1).any()) for row in some)
    if not fits:
        raise ValueError(
            f"{model._base.__name__} changes the output of {model._head_name} (a softcap, a scale) before its loss, "
            "which a loss of rows would miss. Write its training step with augment_reduce.nn.sampled_bound instead."
        )
    model._rows_checked = True


def _kind_of(model: Any) -> str:
    for kind in (CAUSAL, SEQUENCE):
        if any(base.__name__.endswith((kind, OLD_NAMES[kind])) for base in type(model).__mro__):
            return kind
    raise TypeError(
        f"Expected a transformers model whose class ends in {CAUSAL} or {SEQUENCE}, found {type(model).__name__}. For "
        "others put AugmentReduceHead.from_linear(layer) in the place of their output layer and call it with labels."
    )


def _layer_of(model: Any) -> str:
    """The name of the output layer's attribute."""
    if _kind_of(model) == SEQUENCE:
        problem = getattr(model.config, "problem_type", None)
        if problem not in (None, "single_label_classification"):
            raise ValueError(f"Expected the problem_type single_label_classification, found {problem!r}.")
        looked_for: tuple[str, ...] = CLASSIFIERS
    else:
        output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        names = [name for name, child in model.named_children() if child is output]
        if names:
            return names[0]
        looked_for = ("lm_head",)
    for name in looked_for:
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise TypeError(
        f"Expected {type(model).__name__} to have its output layer in {' or '.join(looked_for)}, found neither among "
        f"{', '.join(name for name, _ in model.named_children())}."
    )


def _check_plain_logits(model: Any) -> None:
    for name in CHANGED:
        value = getattr(model.config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(
                f"{type(model).__name__} changes its logits after the output layer ({name}={value}), which the head's "
                "loss would miss. Write its training step with augment_reduce.nn.sampled_bound instead."
            )


def _is_tied(model: Any, layer: nn.Linear) -> bool:
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return embedding is not None and getattr(embedding, "weight", None) is layer.weight


@functools.cache
def patched_class(base: Any, kind: str, name: str) -> type:
    """`base` with the patched forward, under the same name, so that saved models refer to `base`."""
    original = base.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not self.training or (labels is None and kwargs.get("shift_labels") is None):
            return original(self, *args, **kwargs)
        return self._loss_of(original, args, kwargs)

    space = {"forward": forward, "_base": base, "_head_name": name, "_kind": kind, "__module__": base.__module__}
    return type(base.__name__, (Patched, base), space)


def _empty(base: Any, kind: str, name: str) -> Any:
    cls: Any = patched_class(base, kind, name)
    return cls.__new__(cls)
