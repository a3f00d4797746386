"""Validation of parameters, labels and memory, before anything large is allocated.

Every message says what was expected, what was found, where, and what to do.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..model.noise import Noise
from ..sharding import Ranks
from ..support import limits
from .defaults import Settings, Shape, dtype_name

Check = tuple[Callable[[Any], bool], str]  # (is the value valid?, description of the expected values)
LARGEST_FEATURE = 1e15  # one step changes a score by the learning rate times this
EXACT_OVERHEAD = 25_000_000  # bytes
LIGHTEST = 1e-15  # of the largest row weight
MOST_STEPS = 2**53
METHODS = ("augment-reduce", "one-vs-each", "sampled-softmax", "exact")
PRESETS = (None, "paper", "paper-text")


def check_scale(
    largest: float, weight: np.ndarray | None, n_rows: int, n_classes: int, dtype: torch.dtype
) -> None:  # fmt: skip
    """Refuse features (of that largest absolute value) and row weights whose squared gradients would overflow (the
    weights would silently stop changing), and features too large for any step size."""
    heaviest = 1.0 if weight is None else float(weight.max(initial=0.0))
    room, name = math.sqrt(torch.finfo(dtype).max / 1e3), str(dtype).removeprefix("torch.")
    gradient = largest * n_rows * n_classes  # for rows of weight 1; an upper limit of every entry
    wider = ", or use dtype='float64'." if dtype == torch.float32 else "."
    if gradient > room or largest > LARGEST_FEATURE:
        raise ValueError(
            f"Expected features of a size that {name} can square, and of {LARGEST_FEATURE:.0e} at most, but the "
            f"largest is {largest:.3g}. Scale the features to about 1 (StandardScaler, MaxAbsScaler)"
            + (wider if largest <= LARGEST_FEATURE else ".")
        )
    if not LIGHTEST <= heaviest <= room / max(1.0, gradient):
        raise ValueError(
            f"Expected row weights (sample_weight times class_weight) whose largest is between {LIGHTEST:.0e} and "
            f"{room / max(1.0, gradient):.1e}, so that {name} can square gradients, but it is {heaviest:.3g}. "
            "Divide the weights by their mean" + wider
        )


def memory_bytes(settings: Settings, shape: Shape, early_stopping: bool, exact: bool = False) -> dict[str, int]:
    """Bytes of the large allocations of a fit, by name. `exact`: whether the fit, or the search for its prior, solves
    the exact objective over all rows."""
    item = torch.empty(0, dtype=settings.dtype).element_size()
    matrix = shape.n_classes * shape.n_features * item
    nodes = 1 if settings.noise.scalars is not None else getattr(settings.local, "n_nodes", 1)
    columns = settings.n_sampled_classes + 1 + settings.sampler.most_own()
    per_step = settings.batch_size * columns * ((item + 8) * 4 + 3 * item * (nodes - 1))
    sizes = {"weights": matrix}
    sizes["optimiser state"] = (
        shape.n_classes * item if settings.optimizer.rowwise else settings.optimizer.n_states * matrix
    )
    if early_stopping:
        sizes["best weights so far"] = matrix
    kept = settings.local.numbers_a_row if settings.local is not None and settings.local.remembers else 0
    sizes["per-row state"] = shape.n_rows * kept * item
    sizes["class sampler"] = settings.sampler.bytes(shape.n_rows, shape.n_features)
    sizes["rows compared"] = 70 * shape.n_rows if shape.sparse else 0  # to find duplicates; 24 of these remain
    sizes["order of the rows"] = 20 * shape.n_rows  # of two epochs, if a call spans both
    sizes["tables of features"] = (32 + item) * shape.n_features
    sizes["one step"] = per_step
    sizes["looks"] = 64 * min(256 * shape.n_classes, 2_000_000)
    if exact:
        sizes["exact optimum"] = _exact_bytes(shape)
    return sizes


def state_bytes(settings: Settings, shape: Shape, early_stopping: bool) -> int:
    """About the bytes of a model file with its training state."""
    sizes = memory_bytes(settings, shape, early_stopping)
    kept = ("weights", "optimiser state", "best weights so far", "per-row state", "tables of features")
    return sum(sizes.get(name, 0) for name in kept)


def _exact_bytes(shape: Shape) -> int:
    """For `direct`: rows in float64, their eigenbasis, X'X or XX' with its eigenvectors, scores, L-BFGS's pairs. The
    number of simultaneous copies was measured: tests/support/test_limits.py."""
    N, D, K, R = shape.n_rows, shape.n_features, shape.n_classes, min(shape.n_rows, shape.n_features)
    rows = 0 if shape.sparse and N < D else (3 if shape.sparse else 6) * N * D
    return 8 * (rows + 3 * D * R + 3 * N * R + 4 * R * R + 12 * N * K + 40 * K * R) + EXACT_OVERHEAD


def check_weights(n_classes: int, n_features: int, dtype: torch.dtype) -> None:
    """Refuse weights that do not fit into memory, before anything of size K or D is allocated."""
    item = torch.empty(0, dtype=dtype).element_size()
    sizes = {"weights": n_classes * n_features * item, "tables of features": 32 * n_features}
    _refuse_too_large(sizes, 0, n_classes, n_features, dtype)


def check_memory(
    settings: Settings, shape: Shape, early_stopping: bool, anew: bool = True, exact: bool = False,
    n_here: int | None = None,
) -> int:  # fmt: skip
    """Refuse a fit that does not fit into memory, before anything is allocated; return its total bytes, including what
    a continued fit has already allocated. `n_here`: number of classes of this process, if sharded."""
    sizes = memory_bytes(settings, shape, early_stopping, exact)
    if n_here is not None and n_here < shape.n_classes:
        for name in sizes.keys() & {"weights", "optimiser state", "best weights so far"}:
            sizes[name] = sizes[name] * n_here // shape.n_classes
    there = 0 if anew else sizes["weights"] + sizes["optimiser state"]
    _refuse_too_large(sizes, there, shape.n_classes, shape.n_features, settings.dtype)
    return sum(sizes.values())


def _refuse_too_large(
    sizes: dict[str, int], there: int, n_classes: int, n_features: int, dtype: torch.dtype
) -> None:  # fmt: skip
    total = sum(sizes.values()) - there
    available = limits.shortage(total)
    if available is None:
        return
    parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items() if size >= 1e7)
    raise MemoryError(
        f"This fit needs about {total / 1e9:.2f} GB{' more' if there else ''} ({parts or 'in small parts'}) for "
        f"{n_classes:,} classes x {n_features:,} features in {str(dtype).removeprefix('torch.')}, but "
        f"{available / 1e9:.2f} GB are available. Use dtype='float32', optimizer='rowwise-adagrad' (one number a "
        "class instead of a second matrix), early_stopping=False, fewer features (hashing, feature selection), or "
        "drop rare classes; or raise the limit of this process, its job or its container, if it has one."
    )


def check_prediction(needed: int, n_rows: int, n_classes: int) -> None:
    """Refuse a prediction whose result does not fit into memory."""
    available = limits.shortage(needed)
    if available is not None:
        raise MemoryError(
            f"This prediction needs about {needed / 1e9:.2f} GB for {n_rows:,} rows and {n_classes:,} classes, but "
            f"{available / 1e9:.2f} GB are available. Predict some rows at a time, or use predict_topk."
        )


def ranks_of(process_group: Any) -> Ranks:
    """The processes that share the classes: for None and for a group of one, this process."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup) and not is_mesh(process_group):
        raise TypeError(
            "Expected process_group to be None, a torch.distributed.ProcessGroup or a one-dimensional DeviceMesh, "
            f"found {process_group!r}. Call torch.distributed.init_process_group('gloo') and pass "
            "torch.distributed.group.WORLD."
        )
    ranks = Ranks.of(process_group)
    if ranks.size > 1 and dist.get_backend(ranks.group) == "nccl":
        raise ValueError(
            "Expected a process_group of a backend for CPU tensors, found 'nccl': the estimator trains on the CPU over "
            "ranks. Pass torch.distributed.new_group(backend='gloo')."
        )
    return ranks if ranks.size > 1 else Ranks(None)


def is_mesh(value: Any) -> bool:
    return hasattr(value, "get_group") and hasattr(value, "mesh_dim_names")


def check_over_ranks(settings: Settings) -> None:
    """Refuse parameters that need the weights or gradients of all classes in one process."""
    sampler = settings.sampler
    if not sampler.over_ranks or sampler.observes:
        raise ValueError(
            f"class_sampling={sampler.name!r} looks at the weights or gradients of all classes, of which each rank has "
            "some only. With a process_group use 'candidates-shared', 'head-tail-shared' or another sampler that looks "
            "at labels and features, or leave class_sampling='auto'."
        )


def check_parameters(parameters: dict[str, Any], noise: Noise) -> None:
    """Validate the constructor's parameters. (Parts such as samplers validate their own in their constructors.)"""
    for name, (is_right, expected) in EXPECTED.items():
        if not is_right(parameters[name]):
            raise ValueError(f"Expected {name} {expected}, found {parameters[name]!r}{HINTS.get(name, '')}.")
    method = parameters["method"]
    if method in ("one-vs-each", "sampled-softmax") and not noise.conjugate:
        raise ValueError(
            f"method={method!r} is about the softmax only, but model is {noise.name!r}. Use method='augment-reduce' "
            "or 'exact' for that model, or model='softmax'."
        )
    if parameters["max_iter"] is not None and parameters["max_epochs"] is not None:
        raise ValueError("Both max_iter and max_epochs are set; each fixes the number of steps. Set one of them.")
    check_class_weight(parameters["class_weight"])
    if parameters["device"] == "cuda" and parameters["process_group"] is not None:
        raise ValueError(
            "device='cuda' is for one process; with a process_group leave device='auto', which is the CPU."
        )
    if parameters["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("Expected a GPU for device='cuda', but torch sees no CUDA device. Use device='cpu' or 'auto'.")


def check_load(path: Any) -> int:
    """Refuse a model file that does not fit into memory; return its size. The loader reports other faults."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError:
        return 0
    available = limits.shortage(size, mapped=size) if header < size else None  # the header of a safetensors file
    if available is not None:
        raise MemoryError(
            f"The model in {os.fspath(path)} needs about {size / 1e9:.2f} GB, but {available / 1e9:.2f} GB are "
            "available. Free some memory, raise the limit of this process, or load it on a larger machine."
        )
    return size


def check_class_weight(class_weight: Any) -> None:
    if class_weight is None or (isinstance(class_weight, str) and class_weight == "balanced"):
        return
    if not isinstance(class_weight, dict):
        raise ValueError(
            f"Expected class_weight to be None, 'balanced' or a dict from labels to weights, found {class_weight!r}."
        )
    for label, weight in class_weight.items():
        if not (is_number(weight) and 0.0 <= float(weight) < math.inf):
            raise ValueError(f"Expected weights >= 0 in class_weight, found {weight!r} for the class {label!r}.")


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)


def _one_of(*choices: str | None) -> Check:
    words = "to be " + ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
    return lambda value: value is None if value is None and None in choices else _is_text(value, choices), words


def _is_text(value: Any, choices: tuple[str | None, ...]) -> bool:
    return isinstance(value, str) and value in choices


def _count(or_none: bool, most: float = math.inf) -> Check:
    words = "to be a whole number >= 1" + (" or None" if or_none else "")
    return lambda value: (value is None and or_none) or (is_integer(value) and 1 <= int(value) <= most), words


def _positive(*words: str) -> Check:
    def is_right(value: Any) -> bool:
        return value is None or _is_text(value, words) or (is_number(value) and 0.0 < float(value) < math.inf)

    return is_right, "to be a positive number or None"


def _flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


EXPECTED: dict[str, Check] = {
    "method": _one_of(*METHODS),
    "preset": _one_of(*PRESETS),
    "device": _one_of("auto", "cpu", "cuda"),
    "n_sampled_classes": _count(or_none=True),
    "batch_size": _count(or_none=True),
    "max_iter": _count(or_none=True, most=MOST_STEPS),
    "n_iter_no_change": _count(or_none=False),
    "prior_variance": _positive("auto"),
    "intercept_prior_variance": _positive(),
    "fit_intercept": (_flag, "to be True or False"),
    "feature_scaling": (
        lambda value: _flag(value) or (isinstance(value, str) and value == "auto"), "to be 'auto', True or False"
    ),
    "learning_rate": _positive(),
    "max_epochs": _positive(),
    "validation_fraction": (lambda value: is_number(value) and 0.0 < float(value) < 1.0, "in (0, 1)"),
    "tol": (lambda value: is_number(value) and 0.0 <= float(value) < math.inf, "to be a number >= 0"),
    "init_scale": (
        lambda value: value is None or (is_number(value) and 0.0 <= float(value) < math.inf),
        "to be a number >= 0 or None",
    ),
    "early_stopping": (_flag, "to be True or False"),
    "warm_start": (_flag, "to be True or False"),
    "sync": (_flag, "to be True or False"),
    "verbose": (
        lambda value: _flag(value) or (is_integer(value) and int(value) >= 0),
        "to be True, False or a whole number >= 0",
    ),
    "n_jobs": (
        lambda value: value is None or (is_integer(value) and int(value) != 0),
        "to be a whole number other than 0 (-1: all cores) or None (as many as are set, by default all)",
    ),
    "dtype": (
        lambda value: value is None or dtype_name(value) in ("float32", "float64"), "to be None, 'float32' or 'float64'"
    ),
}  # fmt: skip
HINTS = {
    "prior_variance": " (a small variance pulls the weights to zero; None is maximum likelihood, 'auto' our choice)",
}
