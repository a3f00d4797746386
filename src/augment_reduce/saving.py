"""What of an estimator goes into its file, and how it comes back: all parameters, all arrays, the clock, the names.

Parameters are JSON (`encoding`); an object of the user's own class cannot be, and is given again to `load`. What
belongs to the machine (`FROM_THE_LOADER`) is neither written nor taken from a file.

A file may come from anywhere, and its checksum can be made by anybody: nothing of it is used before `model_checks` has
looked at all of it. `save` runs the same checks on what it is about to write, so that what was saved can be loaded.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._version import __version__
from .atomic import target_of
from .cross_validation import Found
from .encoding import EncodingError, decode, encode
from .features import FeatureScaling
from .files import ModelFileError, load_model, pack_names, save_model, unpack_names
from .fitting import TORN, Fitted
from .kernels.reference import Parameters
from .local import Clock
from .model_checks import BEST, LATER, check_contents, check_description
from .training import HISTORY, Plan, Window

if TYPE_CHECKING:
    from .estimator import AugmentReduceClassifier

FROM_THE_LOADER = ("n_jobs", "device")
GIVEN_AGAIN = ("model", "optimizer", "local_step", "class_sampling")  # may be objects of the user's own


# ---- save ----


def save(estimator: AugmentReduceClassifier, path: str | os.PathLike[str]) -> None:
    target_of(path)  # a folder, a folder that is not there: before any work
    description, tensors = contents(estimator)
    own = {name: getattr(estimator, name) for name in GIVEN_AGAIN if "object" in _table(description, name)}
    try:
        check_contents(description, tensors, _parameters(type(estimator), description["parameters"], own))
    except ValueError as error:
        raise ValueError(
            f"This model cannot be saved: {error}. If training diverged, fit again with a lower learning_rate; if a "
            "parameter was changed since, change it back."
        ) from error
    if estimator._fitted.torn:
        warnings.warn(f"Saving to {path}: {TORN}", RuntimeWarning, stacklevel=3)
    save_model(path, description, tensors)


def _table(description: dict[str, Any], name: str) -> dict[str, Any]:
    found = description["parameters"].get(name)
    return found if isinstance(found, dict) else {}


def contents(estimator: AugmentReduceClassifier) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the arrays of a fitted estimator."""
    fitted: Fitted = estimator._fitted
    weight = (
        fitted.parameters.weight if fitted.sparse_weight is None else torch.from_numpy(fitted.sparse_weight.toarray())
    )
    tensors = {
        "weight": weight,
        "bias": fitted.parameters.bias,
        "class_counts": torch.from_numpy(fitted.class_counts),
        "feature_counts": torch.from_numpy(fitted.feature_counts),
        **{f"weight_state.{i}": s for i, s in enumerate(fitted.parameters.weight_state)},
        **{f"bias_state.{i}": s for i, s in enumerate(fitted.parameters.bias_state)},
        **{f"local.{name}": value for name, value in fitted.local.items()},
        **{f"sampler.{name}": value for name, value in fitted.sampler.items()},
        **{f"history.{name}": torch.tensor(fitted.run.history[name], dtype=torch.float64) for name in HISTORY},
        **pack_names("classes", estimator.classes_),
        **({} if fitted.scaling is None else fitted.scaling.tensors("scaling.")),
        **{name: kept.cpu() for name, kept in zip(BEST, fitted.run.best_parameters or (), strict=False)},
    }
    parameters = estimator.get_params(deep=False)
    description = {
        "written_by": __version__,
        "parameters": {name: encode(name, parameters[name]) for name in parameters if name not in FROM_THE_LOADER},
        "n_features": estimator.n_features_in_,
        "classes_dtype": estimator.classes_.dtype.str,
        "clock": [fitted.clock.iteration, fitted.clock.epoch],
        "seed": fitted.seed,
        "bytes_needed": fitted.bytes_needed,
        "rows_seen": fitted.rows_seen,
        "stream_steps": fitted.stream_steps,
        "stopped_early": fitted.run.stopped_early,
        "best_validation": fitted.run.best if math.isfinite(fitted.run.best) else None,
        "without_gain": fitted.run.without_gain,
        "sparse": fitted.sparse_weight is not None,
        "torn": fitted.torn,
        "plan": fitted.run.plan,  # of a fit that was cut short, as is the window
        "window": [fitted.run.window.bound.hex(), fitted.run.window.rows, fitted.run.window.floor_hits],
        "factor": fitted.factor,
        "found": None if fitted.found is None else encode_found(fitted.found),
        "centred": fitted.centred,
        "converged": fitted.converged,
        "training_seconds": fitted.run.seconds,
        "fit_seconds": fitted.seconds,
    }
    if hasattr(estimator, "feature_names_in_"):
        tensors.update(pack_names("features", estimator.feature_names_in_))
    return description, tensors


# ---- load ----


def load(
    cls: type[AugmentReduceClassifier], path: str | os.PathLike[str], objects: dict[str, Any]
) -> AugmentReduceClassifier:
    names = cls._get_param_names()
    for name in objects:
        if name not in names:
            raise TypeError(f"{name!r} is no parameter of {cls.__name__}; expected some of {', '.join(names)}.")
    description, tensors = load_model(path)
    try:
        check_description(description)
        parameters = _parameters(cls, description["parameters"], objects)
        check_contents(description, tensors, parameters)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise ModelFileError(f"{path}: {str(error).removesuffix('.')}.") from error
    estimator = cls(**parameters | objects)
    estimator.classes_ = unpack_names("classes", tensors, description["classes_dtype"])
    estimator.n_features_in_ = description["n_features"]
    if "features.text" in tensors:
        estimator.feature_names_in_ = unpack_names("features", tensors, "O")
    estimator._fitted = _fitted(LATER | description, tensors)
    estimator._publish()
    return estimator.sparsify() if description["sparse"] else estimator


def _parameters(cls: type[AugmentReduceClassifier], found: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    """All parameters that a file has, those of `GIVEN_AGAIN` as the loader gives them; else the constructor's defaults.

    What else the loader gives is not the file's, and looked at by `fit`.
    """
    signature = inspect.signature(cls).parameters
    defaults = {name: signature[name].default for name in cls._get_param_names()}
    parameters = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
    for name, value in found.items():
        if name not in defaults:
            raise EncodingError(f"parameters: expected some of {', '.join(defaults)}, found {name[:60]!r}")
        if name not in FROM_THE_LOADER and name not in objects:
            parameters[name] = decode(name, value)
    return parameters | {name: objects[name] for name in GIVEN_AGAIN if name in objects}


def _fitted(description: dict[str, Any], tensors: dict[str, Tensor]) -> Fitted:
    states = ([tensors[name] for name in _numbered(kind, tensors)] for kind in ("weight_state", "bias_state"))
    fitted = Fitted(
        Parameters(tensors["weight"], tensors["bias"], *states),
        seed=description["seed"],
        bytes_needed=description["bytes_needed"],
        clock=Clock(*description["clock"]),
        local=_named("local.", tensors),
        sampler=_named("sampler.", tensors),
        rows_seen=description["rows_seen"],
        stream_steps=description["stream_steps"],
        class_counts=tensors["class_counts"].numpy(),
        feature_counts=tensors["feature_counts"].numpy(),
    )
    history = {name: column.tolist() for name, column in _named("history.", tensors).items()}
    missing = [math.nan] * len(history["iteration"])
    fitted.run.history = {name: history.get(name, missing[:]) for name in HISTORY}
    fitted.run.stopped_early = description["stopped_early"]
    fitted.torn = description["torn"]
    fitted.factor, fitted.centred = float(description["factor"]), description["centred"]
    fitted.converged = description["converged"]
    fitted.found = None if description["found"] is None else decode_found(description["found"])
    if "scaling.scale" in tensors:
        fitted.scaling = FeatureScaling.from_tensors(_named("scaling.", tensors))
    fitted.run.plan = None if description["plan"] is None else Plan(*description["plan"])
    bound, n_rows, floor_hits = description["window"]
    fitted.run.window = Window(float.fromhex(bound), n_rows, floor_hits)
    spent, elapsed = description["training_seconds"], fitted.run.history["seconds"]
    fitted.run.seconds = (elapsed[-1] if elapsed else 0.0) if spent is None else float(spent)
    fitted.seconds.update(description["fit_seconds"])
    best = description["best_validation"]
    fitted.run.best = -math.inf if best is None else float(best)
    fitted.run.without_gain = description["without_gain"]
    if BEST[0] in tensors:
        fitted.run.best_parameters = (tensors[BEST[0]], tensors[BEST[1]])
    return fitted


def encode_found(found: Found) -> dict[str, Any]:
    """JSON has no NaN: where nothing was judged the loss is null."""
    loss = found.loss if math.isfinite(found.loss) else None
    numbers = {name: float(getattr(found, name)) for name in ("variance", "factor", "rate", "noise_scale")}
    return vars(found) | numbers | {"loss": loss}


def decode_found(entry: dict[str, Any]) -> Found:
    return Found(**entry | {"loss": math.nan if entry["loss"] is None else entry["loss"]})


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _numbered(kind: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """`kind.0`, `kind.1` and so on, as many as there are one after the other."""
    return list(itertools.takewhile(tensors.__contains__, (f"{kind}.{i}" for i in itertools.count())))
