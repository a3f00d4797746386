"""Validation of model files before use: every entry, then the consistency of entries.

Every error is a ValueError that begins with the name of the entry. A valid file cannot cause reads outside an array,
allocations beyond a small multiple of its size, or training from a state that no fit produces. Whether the model is a
good one cannot be checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.defaults import LOCAL_STEPS, Shape, resolve
from ..config.validation import check_parameters
from ..local.base import LocalStep
from ..model.noise import resolve_noise
from ..optim import Adam, RowOptimizer
from ..sampling import SAMPLERS, ClassSampler
from ..support import layout
from ..support.layout import Entry, Layout, LayoutError
from ..training.looks import MOST_ROWS
from ..training.loop import HISTORY, SECONDS, Plan
from .encoding import OURS
from .files import unpack_names

LARGEST = 2**53  # largest count: integers that float64 represents exactly
MOST_STEPS = 2**50
BEST = ("best.weight", "best.bias")  # only if early stopping was interrupted; else the weights are the best ones
MAY_BE_NAN = ("bound", "validation_log_likelihood", "bound_gap", "training_log_likelihood")
HERE = "classes here"  # the size of arrays with a row for each class, K in one process
FIRST_HISTORY = HISTORY[:7]  # the columns of the first release; later ones may be missing

Check = tuple[Callable[[Any], bool], str]  # (is the value valid?, description of the expected values)


def _whole(high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value <= high


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_flag(value: Any) -> bool:
    return value in (False, True)


def _are_weights(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(weight) and weight >= 0 for weight in value.values())


def _is_plan(value: Any) -> bool:
    """Valid arguments of `Plan`: at least 1 iteration between records and between bounds; 0: no evaluations."""
    if value is None:
        return True
    fewest, most = len(Plan._fields) - len(Plan._field_defaults), len(Plan._fields)
    if not isinstance(value, list) or not fewest <= len(value) <= most or not all(map(_whole(LARGEST), value)):
        return False
    plan = Plan(*value)
    return plan.record_every >= 1 and plan.bound_every >= 1 and plan.gap_rows <= MOST_ROWS


def _is_window(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(map(_whole(LARGEST), value[1:])):
        return False
    try:
        return math.isfinite(float.fromhex(value[0]))
    except (TypeError, ValueError, OverflowError):
        return False


def _is_found(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() == {"variance", "factor", "loss", "n_folds", "why", "rate", "noise_scale"}
        and all(_is_number(value[name]) and value[name] > 0 for name in ("variance", "factor", "rate", "noise_scale"))
        and (value["loss"] is None or _is_number(value["loss"]))
        and _whole(LARGEST)(value["n_folds"])
        and isinstance(value["why"], str)
    )


def _are_seconds(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= set(SECONDS)
        and all(_is_number(spent) and spent >= 0 for spent in value.values())
    )


DESCRIPTION: dict[str, Check] = {
    "written_by": (lambda value: isinstance(value, str), "the version that wrote the file"),
    "parameters": (lambda value: isinstance(value, dict), "a table of parameters"),
    "n_features": (_whole(LARGEST), "a number of features"),
    "classes_dtype": (lambda value: isinstance(value, str), "a numpy dtype"),
    "clock": (
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(_whole(MOST_STEPS), value)),
        "two counts, of iterations and epochs",
    ),
    "seed": (_whole(2**31 - 1), "a whole number from 0 to 2**31 - 1"),
    "bytes_needed": (_whole(2**62), "a number of bytes"),
    "rows_seen": (_whole(LARGEST), "a number of rows"),
    "stream_steps": (_whole(MOST_STEPS), "a number of steps"),
    "stopped_early": (lambda value: type(value) is bool, "true or false"),
    "best_validation": (lambda value: value is None or _is_number(value), "a number or null"),
    "without_gain": (_whole(LARGEST), "a number of looks"),
    "sparse": (lambda value: type(value) is bool, "true or false"),
    "torn": (lambda value: type(value) is bool, "true or false"),
    "plan": (_is_plan, f"null, or {len(Plan._fields)} counts of iterations and rows"),
    "window": (_is_window, "a number in hexadecimal and two counts"),
    "factor": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "found": (_is_found, "null, or a variance and how it was found"),
    "centred": (lambda value: type(value) is bool, "true or false"),
    "converged": (lambda value: type(value) is bool, "true or false"),
    "training_seconds": (lambda value: value is None or (_is_number(value) and value >= 0), "a number >= 0 or null"),
    "fit_seconds": (_are_seconds, f"seconds by {', '.join(SECONDS)}"),
}
LATER: dict[str, Any] = {  # missing in the first files
    "stream_steps": 0,
    "best_validation": None,
    "without_gain": 0,
    "torn": False,
    "plan": None,
    "window": [(0.0).hex(), 0, 0],
    "factor": 1.0,
    "found": None,
    "centred": False,
    "converged": True,
    "training_seconds": None,
    "fit_seconds": {},
}
PARAMETERS: dict[str, Check] = {  # not checked by `check_parameters` and `resolve`
    "early_stopping": (_is_flag, "true or false"),
    "warm_start": (_is_flag, "true or false"),
    "tol": (lambda value: type(value) in (int, float), "a number"),
    "verbose": (lambda value: type(value) is bool or _is_number(value), "a number"),
    "random_state": (lambda value: value is None or _whole(2**32 - 1)(value), "a seed or null"),
    "class_weight": (
        lambda value: value is None or value == "balanced" or _are_weights(value),
        "null, 'balanced' or weights of classes, none below 0",
    ),
}


def check_description(description: dict[str, Any]) -> None:
    """Validate every entry of the description by itself."""
    for name in description.keys() - DESCRIPTION.keys():
        raise ValueError(f"description: expected no entry {name[:60]!r}, found one")
    for name, (fits, expected) in DESCRIPTION.items():
        if name not in description and name not in LATER:
            raise ValueError(f"{name}: expected {expected}, found no such entry in the description")
        if name in description and not fits(description[name]):
            raise ValueError(f"{name}: expected {expected}, found {_shown(description[name])}")


def check_contents(
    description: dict[str, Any], tensors: Mapping[str, Tensor], parameters: dict[str, Any],
    n_classes: int | None = None,
) -> None:  # fmt: skip
    """Validate a checked description, arrays and parameters against each other. `n_classes`: of all ranks, where the
    arrays with a row for each class are of this rank's classes."""
    weight = tensors.get("weight")
    few = 2 if n_classes is None else 1
    if weight is None or weight.ndim != 2 or weight.dtype not in (torch.float32, torch.float64) or len(weight) < few:
        found = "none" if weight is None else f"shape {tuple(weight.shape)} of {weight.dtype}"
        raise LayoutError("weight", "a row of float32 or float64 for each of at least 2 classes", found)
    (here, D), K = weight.shape, len(weight) if n_classes is None else n_classes
    if description["n_features"] != D:
        raise ValueError(f"n_features: expected {D}, the columns of weight, found {description['n_features']}")
    steps, epochs = description["clock"]
    if epochs > steps or description.get("stream_steps", 0) > steps:
        raise ValueError(f"clock: expected at most as many epochs and steps of a stream as iterations, {steps}")
    check_parameter_values(parameters, K, D, description["rows_seen"])
    groups = _grouped(tensors)
    sizes = {"K": K, "D": D, HERE: here}
    layout.check(groups.pop(""), _parts(description["rows_seen"]), sizes, weight.dtype)
    check_counts(tensors, description["rows_seen"])
    check_states(groups, parameters["optimizer"], sizes, weight.dtype)
    check_history(groups.pop("history", {}), steps, weight.dtype)
    check_names(groups, tensors, description["classes_dtype"], sizes)
    local = parameters["local_step"]
    known = local if isinstance(local, LocalStep) else None
    check_kept("local", groups.pop("local", {}), known, LOCAL_STEPS.values(), sizes, weight.dtype)
    sampler = parameters["class_sampling"]
    drawn_by = sampler if isinstance(sampler, ClassSampler) else None
    check_kept("sampler", groups.pop("sampler", {}), drawn_by, SAMPLERS.values(), sizes, weight.dtype)
    if "best" in groups:
        like = {"best.weight": Entry("weights", (HERE, "D")), "best.bias": Entry("weights", (HERE,))}
        layout.check(groups.pop("best"), like, sizes, weight.dtype)
    if "late" in groups and n_classes is not None:
        check_late(groups.pop("late"), sizes, weight.dtype)
    if "scaling" in groups:
        check_scaling(groups.pop("scaling"), sizes, weight.dtype)
    for group in groups.values():
        raise LayoutError(next(iter(group))[:60], "no such array", "one")


def _grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The arrays, grouped by the part of their names before the first dot."""
    groups: dict[str, dict[str, Tensor]] = {"": {}}
    for name, tensor in tensors.items():
        prefix, dot, _ = name.partition(".")
        groups.setdefault(prefix if dot else "", {})[name] = tensor
    return groups


def _parts(rows_seen: int) -> Layout:
    return {
        "weight": Entry("weights", (HERE, "D")),
        "bias": Entry("weights", (HERE,)),
        "class_counts": Entry("float64", ("K",), 0, rows_seen),
        "feature_counts": Entry("int64", ("D",), 0, rows_seen),
    }


def check_counts(tensors: Mapping[str, Tensor], rows_seen: int) -> None:
    counted = tensors["class_counts"].sum().item()
    if counted != rows_seen:
        raise LayoutError("class_counts", f"counts that sum to rows_seen, {rows_seen}", f"a sum of {counted}")


def check_parameter_values(parameters: dict[str, Any], K: int, D: int, rows_seen: int) -> None:
    """Validate parameters as `fit` does, and in combination."""
    for name, (fits, expected) in PARAMETERS.items():
        if not fits(parameters[name]):
            raise ValueError(f"{name}: expected {expected}, found {_shown(parameters[name])}")
    noise = resolve_noise(parameters["model"])
    check_parameters(parameters, noise)
    n_rows = max(1, rows_seen)
    resolve(parameters, noise, Shape(n_rows, D, K, n_nonzero=n_rows), torch.float32)


def check_states(
    groups: dict[str, dict[str, Tensor]], optimizer: Any, sizes: dict[str, int], weights: torch.dtype
) -> None:
    """Optimiser state: none if no steps were taken; else one or two numbers per weight, or one per row of weights; the
    same for biases."""
    of_weights, of_biases = groups.pop("weight_state", {}), groups.pop("bias_state", {})
    n = len(of_weights)
    if not 0 <= n <= 2 or len(of_biases) != n:
        raise LayoutError(
            "weight_state", "up to two arrays, and as many of bias_state", f"{n} and {len(of_biases)}"
        )  # fmt: skip
    rowwise = n == 1 and of_weights.get("weight_state.0", torch.empty(0)).ndim == 1
    own_rule = isinstance(optimizer, RowOptimizer) and type(optimizer) not in OURS
    for kind, found, shape in (
        ("weight_state", of_weights, (HERE,) if rowwise else (HERE, "D")),
        ("bias_state", of_biases, (HERE,)),
    ):
        # Sums of squares; only Adam's first state, a mean of gradients, may be negative.
        low = [-math.inf if own_rule or (n == Adam().n_states and i == 0) else 0.0 for i in range(n)]
        layout.check(found, {f"{kind}.{i}": Entry("weights", shape, low[i]) for i in range(n)}, sizes, weights)


def check_scaling(found: Mapping[str, Tensor], sizes: dict[str, int], weights: torch.dtype) -> None:
    """Centres and positive scales of all features."""
    smallest = math.ulp(0.0)
    entries = {
        "scaling.centre": Entry("float64", ("D",)),
        "scaling.scale": Entry("float64", ("D",), smallest),
        "scaling.activity": Entry("float64", ("D",), 0.0, 1.0 + 1e-9),
    }
    layout.check(found, entries, sizes, weights)


def check_late(found: Mapping[str, Tensor], sizes: dict[str, int], weights: torch.dtype) -> None:
    """What a step over ranks leaves to the next: the number that its exponentials were divided by, and its gradient
    where that is still to be pushed."""
    wanted = {"late.shift": Entry("float64", (1,))}
    if len(found) > 1:
        wanted |= {
            "late.rows": Entry("int64", ("U",), 0), "late.classes": Entry("int64", ("n",), 0, "K"),
            "late.grad": Entry("weights", ("n", "U")), "late.pairs": Entry("int64", ("Q",), 0, "K"),
            "late.run": Entry("int64", ("Q",), 0, "U"), "late.pair_grad": Entry("weights", ("Q",)),
            "late.prior_scale": Entry("float64", (1,), 0.0), "late.floor_hits": Entry("int64", (1,), 0, LARGEST),
        }  # fmt: skip
    if "late.shares" in found:
        wanted |= {"late.shares": Entry("weights", ("n", "U")), "late.pair_shares": Entry("weights", ("Q",))}
    if "late.bound" in found:
        wanted["late.bound"] = Entry("weights", ("B",))
    layout.check({name: found[name] for name in wanted if name in found}, wanted, dict(sizes), weights)
    for name in found.keys() - wanted.keys():
        raise LayoutError(name[:60], "no such array", "one")


def check_history(columns: Mapping[str, Tensor], steps: int, weights: torch.dtype) -> None:
    def column(name: str) -> Entry:
        high = steps if name == "iteration" else math.inf
        return Entry("float64", ("H",), 0.0, high, may_be_nan=name in MAY_BE_NAN)

    wanted = [name for name in HISTORY if name in FIRST_HISTORY or f"history.{name}" in columns]
    layout.check(columns, {f"history.{name}": column(name) for name in wanted}, {}, weights)


def check_names(
    groups: dict[str, dict[str, Tensor]], tensors: Mapping[str, Tensor], dtype: str, sizes: dict[str, int]
) -> None:
    """Names for all classes, in order; for all features or none."""
    expected = ("values",) if "classes.values" in tensors else ("text", "ends")
    classes = unpack_names("classes", dict(tensors), dtype)
    _only("classes", groups.pop("classes", {}), expected)
    if len(classes) != sizes["K"]:
        raise LayoutError("classes", f"{sizes['K']} names, one for each row of weight", f"{len(classes)}")
    if not (classes[:-1] < classes[1:]).all() or (classes.dtype.kind == "f" and not np.isfinite(classes).all()):
        raise LayoutError("classes", "names in ascending order, each once", "others")
    if "features" in groups:
        features = unpack_names("features", dict(tensors), "O")
        _only("features", groups.pop("features"), ("text", "ends"))
        if len(features) != sizes["D"]:
            raise LayoutError("features", f"{sizes['D']} names, one for each column of weight", f"{len(features)}")


def _only(prefix: str, group: Mapping[str, Tensor], expected: Iterable[str]) -> None:
    for name in group.keys() - {f"{prefix}.{suffix}" for suffix in expected}:
        raise LayoutError(name[:60], "no such array", "one")


def check_kept(
    prefix: str, found: Mapping[str, Tensor], own: LocalStep | ClassSampler | None, known: Iterable[Any],
    sizes: dict[str, int], weights: torch.dtype,
) -> None:  # fmt: skip
    """State of a local step or a sampler: it has to match a layout of the library's classes (not necessarily the one
    used next, which ignores other state), or of a user-defined one; a user-defined step without a layout checks it
    itself."""
    if not found:
        return
    named = {name.removeprefix(f"{prefix}."): tensor for name, tensor in found.items()}
    layouts = [*(own.layouts() if own is not None else ()), *(one for cls in known for one in cls.layouts())]
    for one in layouts:
        if one.keys() == named.keys():
            shown = {f"{prefix}.{name}": entry for name, entry in one.items()}
            layout.check(found, shown, dict(sizes), weights)
            return
    if own is None or type(own) in OURS:
        raise LayoutError(
            f"{prefix}.{next(iter(named))}"[:60], "the arrays of one of ours", ", ".join(sorted(named))[:200]
        )  # fmt: skip


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
