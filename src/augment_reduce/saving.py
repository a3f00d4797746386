"""What of an estimator goes into its file, and how it comes back: all parameters, all arrays, the clock, the names.

Parameters are JSON. Our own small objects (optimisers, local steps, samplers, noises) are written by name and fields;
an object of the user's own class cannot be, and is given again to `load`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ._version import __version__
from .defaults import LOCAL_STEPS
from .files import ModelFileError, load_model, pack_names, save_model, unpack_names
from .fitting import Fitted
from .kernels.reference import Parameters
from .local import Clock, StepSize
from .noise import NOISES
from .optim import OPTIMIZERS
from .sampler import SAMPLERS
from .training import HISTORY

if TYPE_CHECKING:
    from .estimator import AugmentReduceClassifier

KNOWN: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *OPTIMIZERS.values(), *LOCAL_STEPS.values(), *SAMPLERS.values(), *NOISES.values(), StepSize
    )
}  # fmt: skip
BEST = ("best.weight", "best.bias")  # only where early stopping was interrupted: else they are the weights


def encode(value: Any) -> Any:
    """A parameter as JSON. Objects of other classes become {"object": repr}: named, not kept."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"pairs": [[encode(k), encode(v)] for k, v in value.items()]}
    if KNOWN.get(type(value).__name__) is type(value):
        names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else _plain_fields(value)
        return {"known": type(value).__name__, "fields": {name: encode(getattr(value, name)) for name in names}}
    return {"object": repr(value)}


def _plain_fields(value: Any) -> list[str]:
    """The constructor arguments of a sampler or noise: the attributes that have their names."""
    return [name for name in inspect.signature(type(value)).parameters if hasattr(value, name)]


def decode(name: str, value: Any, objects: dict[str, Any]) -> Any:
    if name in objects:
        return objects[name]
    if not isinstance(value, dict):
        return value
    if "pairs" in value:
        return {k: v for k, v in value["pairs"]}  # noqa: C416 (pairs are lists)
    if "known" in value:
        return KNOWN[value["known"]](**{k: decode("", v, {}) for k, v in value["fields"].items()})
    if name == "random_state":
        return None
    raise ModelFileError(
        f"The model was saved with {name}={value['object']}, an object of your own class, which a file cannot hold. "
        f"Give it again: AugmentReduceClassifier.load(path, {name}=...)."
    )


def save(estimator: AugmentReduceClassifier, path: str | os.PathLike[str]) -> None:
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
        **{name: kept.cpu() for name, kept in zip(BEST, fitted.run.best_parameters or (), strict=False)},
    }
    description = {
        "written_by": __version__,
        "parameters": {name: encode(value) for name, value in estimator.get_params(deep=False).items()},
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
    }
    if hasattr(estimator, "feature_names_in_"):
        tensors.update(pack_names("features", estimator.feature_names_in_))
    save_model(path, description, tensors)


def load(
    cls: type[AugmentReduceClassifier], path: str | os.PathLike[str], objects: dict[str, Any]
) -> AugmentReduceClassifier:
    description, tensors = load_model(path)
    try:
        parameters = {name: decode(name, value, objects) for name, value in description["parameters"].items()}
        estimator = cls(**parameters)
        estimator.classes_ = unpack_names("classes", tensors, description["classes_dtype"])
        estimator.n_features_in_ = int(description["n_features"])
        if "features.text" in tensors:
            estimator.feature_names_in_ = unpack_names("features", tensors, "O")
        estimator._fitted = _fitted(description, tensors)
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"{path} lacks something a model file must have: {error}.") from error
    estimator._publish()
    return estimator.sparsify() if description["sparse"] else estimator


def _fitted(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Fitted:
    def numbered(prefix: str) -> list[torch.Tensor]:
        return [tensors[name] for name in sorted(tensors) if name.startswith(prefix)]

    def named(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    parameters = Parameters(tensors["weight"], tensors["bias"], numbered("weight_state."), numbered("bias_state."))
    fitted = Fitted(
        parameters,
        seed=int(description["seed"]),
        bytes_needed=int(description["bytes_needed"]),
        clock=Clock(*description["clock"]),
        local=named("local."),
        sampler=named("sampler."),
        rows_seen=int(description["rows_seen"]),
        stream_steps=int(description.get("stream_steps", 0)),
        class_counts=tensors["class_counts"].numpy(),
        feature_counts=tensors["feature_counts"].numpy(),
    )
    fitted.run.history = {name: tensors[f"history.{name}"].tolist() for name in HISTORY}
    fitted.run.stopped_early = bool(description["stopped_early"])
    best = description.get("best_validation")
    fitted.run.best = -math.inf if best is None else float(best)
    fitted.run.without_gain = int(description.get("without_gain", 0))
    if BEST[0] in tensors:
        fitted.run.best_parameters = (tensors[BEST[0]], tensors[BEST[1]])
    return fitted
