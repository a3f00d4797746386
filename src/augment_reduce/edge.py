"""Checks at the edge: what cannot be fitted is refused before anything is allocated or overwritten.

Every message says what was expected, what was found, where, and what to do.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch

from .defaults import Settings, Shape
from .noise import Noise

METHODS = ("augment-reduce", "one-vs-each", "sampled-softmax", "exact")
PRESETS = (None, "paper", "paper-text")


def check_labels(y: np.ndarray) -> None:
    """Labels given as objects: none missing, and all of them text or all of them numbers."""
    if y.dtype.kind != "O":
        return
    missing = [i for i, label in enumerate(y) if label is None or label != label]
    if missing:
        raise ValueError(
            f"Expected a label for every row, but {len(missing)} of {len(y)} are missing (None or NaN); first at row "
            f"{missing[0]}. Drop those rows, or give them a class of their own."
        )
    kinds = {"text" if isinstance(label, str) else "number" for label in y}
    if len(kinds) > 1:
        first = next(i for i, label in enumerate(y) if isinstance(label, str) != isinstance(y[0], str))
        raise ValueError(
            f"Expected labels of one kind, but they mix text and numbers: row 0 has {y[0]!r}, row {first} has "
            f"{y[first]!r}. Convert them all to text."
        )


def check_scale(values: np.ndarray, n_rows: int, n_classes: int, dtype: torch.dtype) -> None:
    """Features so large that squared gradients would overflow, and the weights silently stand still, are refused."""
    largest = float(max(values.max(initial=0.0), -values.min(initial=0.0)))
    gradient = largest * n_rows * n_classes  # no entry's gradient can be larger
    if gradient > math.sqrt(torch.finfo(dtype).max / 1e3):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"Expected features of a size that {name} can square, but the largest is {largest:.3g}. "
            "Scale the features to about 1 (StandardScaler, MaxAbsScaler)"
            + (", or use dtype='float64'." if dtype == torch.float32 else ".")
        )


def memory_bytes(settings: Settings, shape: Shape, early_stopping: bool) -> dict[str, int]:
    """What a fit will allocate that is large, by name, in bytes."""
    item = torch.empty(0, dtype=settings.dtype).element_size()
    matrix = shape.n_classes * shape.n_features * item
    nodes = 1 if settings.noise.name == "softmax" else getattr(settings.local, "n_nodes", 1)
    columns = settings.n_sampled_classes + 1 + settings.sampler.most_own()
    per_step = settings.batch_size * columns * ((item + 8) * 4 + 3 * item * (nodes - 1))
    sizes = {"weights": matrix}
    sizes["optimiser state"] = (
        shape.n_classes * item if settings.optimizer.rowwise else settings.optimizer.n_states * matrix
    )
    if early_stopping:
        sizes["best weights so far"] = matrix
    kept_for_rows = settings.local is not None and settings.local.remembers
    sizes["per-row state"] = shape.n_rows * 3 * item if kept_for_rows else 0
    sizes["class sampler"] = settings.sampler.bytes(shape.n_rows, shape.n_features)
    sizes["rows compared"] = 70 * shape.n_rows if shape.sparse else 0  # which have the same features; 8 of them stay
    sizes["order of the rows"] = 20 * shape.n_rows  # of two epochs where one call goes from one into the next
    sizes["one step"] = per_step
    return sizes


def available_bytes() -> int | None:
    """Memory that can be had now, or None where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def check_memory(settings: Settings, shape: Shape, early_stopping: bool, *, goes_on: bool = False) -> int:
    """Refuse, before anything is allocated, a fit that cannot fit; return the bytes it will take.

    A fit that `goes_on` has its weights and their state already.
    """
    sizes = memory_bytes(settings, shape, early_stopping)
    if goes_on:
        sizes |= {"weights": 0, "optimiser state": 0}
    total, available = sum(sizes.values()), available_bytes()
    if available is not None and total > available:
        parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items() if size >= 1e7)
        raise MemoryError(
            f"This fit needs about {total / 1e9:.2f} GB ({parts}) for {shape.n_classes:,} classes x "
            f"{shape.n_features:,} features in {str(settings.dtype).removeprefix('torch.')}, but "
            f"{available / 1e9:.2f} GB are available. Use dtype='float32', optimizer='rowwise-adagrad' (one number a "
            "class instead of a second matrix), early_stopping=False, fewer features (hashing, feature selection), or "
            "drop rare classes."
        )
    return total


def check_parameters(parameters: dict[str, object], noise: Noise) -> None:
    """Refuse what makes no sense, before anything else happens."""
    method, preset = parameters["method"], parameters["preset"]
    if method not in METHODS:
        raise ValueError(f"Expected method to be one of {', '.join(map(repr, METHODS))}, found {method!r}.")
    if preset not in PRESETS:
        raise ValueError(f"Expected preset to be None, 'paper' or 'paper-text', found {preset!r}.")
    if method in ("one-vs-each", "sampled-softmax") and noise.name != "softmax":
        raise ValueError(
            f"method={method!r} is about the softmax only, but model is {noise.name!r}. Use method='augment-reduce' "
            "or 'exact' for that model, or model='softmax'."
        )
    for name in ("n_sampled_classes", "batch_size", "max_iter", "n_iter_no_change"):
        value = parameters[name]
        if value is not None and not (_is_integer(value) and int(value) >= 1):  # type: ignore[call-overload]
            raise ValueError(f"Expected {name} to be a whole number >= 1 or None, found {value!r}.")
    for name in ("prior_variance", "learning_rate", "max_epochs"):
        value = parameters[name]
        if name == "prior_variance" and isinstance(value, str) and value == "auto":
            continue
        if value is not None and not (_is_number(value) and 0.0 < float(value) < math.inf):  # type: ignore[arg-type]
            hint = (
                " (a small variance pulls the weights to zero; None is maximum likelihood, 'auto' our choice)"
                if "prior" in name
                else ""
            )
            raise ValueError(f"Expected {name} to be a positive number or None, found {value!r}{hint}.")
    if parameters["max_iter"] is not None and parameters["max_epochs"] is not None:
        raise ValueError("Both max_iter and max_epochs are set; they say the same thing twice. Set one of them.")
    fraction = parameters["validation_fraction"]
    if not (_is_number(fraction) and 0.0 < float(fraction) < 1.0):  # type: ignore[arg-type]
        raise ValueError(f"Expected validation_fraction in (0, 1), found {fraction!r}.")
    scale = parameters["init_scale"]
    if scale is not None and not (_is_number(scale) and 0.0 <= float(scale) < math.inf):  # type: ignore[arg-type]
        raise ValueError(f"Expected init_scale to be a number >= 0 or None, found {scale!r}.")
    jobs = parameters["n_jobs"]
    if jobs is not None and not (_is_integer(jobs) and int(jobs) != 0):  # type: ignore[call-overload]
        raise ValueError(f"Expected n_jobs to be a whole number other than 0, or None for all cores; found {jobs!r}.")
    if parameters["device"] not in ("auto", "cpu", "cuda"):
        raise ValueError(f"Expected device to be 'auto', 'cpu' or 'cuda', found {parameters['device']!r}.")
    if parameters["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("Expected a GPU for device='cuda', but torch sees no CUDA device. Use device='cpu' or 'auto'.")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__float__")


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")
