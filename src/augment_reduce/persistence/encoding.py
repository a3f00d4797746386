"""An estimator's parameters as JSON and back: numbers, text and the library's own small objects, all validated.

None, True, 3, 0.5, "adagrad"                  as they are
infinity, NaN                                  {"number": "inf"}
{"a": 2.0}, a class_weight                     {"pairs": [["a", 2.0]]}
Newton(n_nodes=7)                              {"known": "Newton", "fields": {...}}, read where a local step may be
an object of another class                     {"object": repr}: named, not kept; given again to `load`
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..config.defaults import LOCAL_STEPS, resolve_dtype
from ..local.base import StepSize
from ..model.noise import NOISES
from ..optim import OPTIMIZERS
from ..sampling import RENAMED, SAMPLERS

ROLES: dict[str, Iterable[type]] = {
    "model": NOISES.values(), "optimizer": OPTIMIZERS.values(), "local_step": LOCAL_STEPS.values(),
    "class_sampling": SAMPLERS.values(), "step_size": (StepSize,),
}  # fmt: skip
KNOWN = {(role, cls.__name__): cls for role, classes in ROLES.items() for cls in classes}
OURS = {cls for classes in ROLES.values() for cls in classes}
NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
Scalar = bool | int | float | str


class EncodingError(ValueError):
    """An invalid value of a parameter in a description: which parameter, expected, found."""


# ---- to JSON ----


def encode(name: str, value: Any) -> Any:
    """The parameter of that name as JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if value is None or isinstance(value, Scalar):
        return value
    if name == "dtype":  # np.float32, torch.float64 or the like
        return _dtype_name(value)
    if isinstance(value, dict):
        return {"pairs": [[encode("", k), encode("", v)] for k, v in value.items()]}
    if type(value) in OURS:
        return {"known": type(value).__name__, "fields": {f: encode(f, getattr(value, f)) for f in _fields(value)}}
    return {"object": repr(value)}


def _fields(value: Any) -> list[str]:
    """The constructor's arguments, read from the attributes of the same names."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [name for name in inspect.signature(type(value)).parameters if hasattr(value, name)]


def _dtype_name(value: Any) -> str:
    return str(resolve_dtype(value, torch.float32)).removeprefix("torch.")


# ---- from JSON ----


def decode(name: str, value: Any) -> Any:
    """The parameter of that name; anything that `encode` cannot have written raises `EncodingError`."""
    if not isinstance(value, dict):
        value = _scalar(name, value)
        return RENAMED.get(value, value) if name == "class_sampling" and isinstance(value, str) else value
    if len(value) == 1 and isinstance(value.get("number"), str) and value["number"] in NOT_FINITE:
        return NOT_FINITE[value["number"]]
    if value.keys() == {"pairs"}:
        return _pairs(name, value["pairs"])
    if value.keys() == {"known", "fields"}:
        return _known(name, value["known"], value["fields"])
    if value.keys() == {"object"}:
        return _lost(name, value["object"])
    raise EncodingError(f"{name}: expected a number, text or an object of ours, found {_shown(value)}")


def _scalar(name: str, value: Any) -> Any:
    finite = not isinstance(value, float) or math.isfinite(value)  # 1e999 parses as infinity
    small = not isinstance(value, int) or -(2**63) <= value < 2**63
    if (value is None or isinstance(value, Scalar)) and finite and small:
        return value
    raise EncodingError(f"{name}: expected a number of 64 bits, text or null, found {_shown(value)}")


def _pairs(name: str, pairs: Any) -> dict[Any, Any]:
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise EncodingError(f"{name}: expected a list of pairs, found {_shown(pairs)}")
    return {_scalar(name, key): _scalar(name, value) for key, value in pairs}


def _known(name: str, cls_name: Any, fields: Any) -> Any:
    """An object of one of the classes allowed for this parameter, made by its constructor."""
    cls = KNOWN.get((name, RENAMED.get(cls_name, cls_name))) if isinstance(cls_name, str) else None
    if cls is None:
        names = ", ".join(known for role, known in KNOWN if role == name)
        raise EncodingError(f"{name}: expected {f'one of {names}' if names else 'no object'}, found {_shown(cls_name)}")
    hints = _hints(cls)
    if not isinstance(fields, dict) or not fields.keys() <= hints.keys():
        raise EncodingError(f"{name}: expected {cls_name} with some of {', '.join(hints)}, found {_shown(fields)}")
    arguments = {field: decode(field, value) for field, value in fields.items()}
    for field, value in arguments.items():
        if not _is_a(value, hints[field]):
            raise EncodingError(f"{name}: expected {cls_name}.{field} as {hints[field]}, found {_shown(value)}")
    try:
        return cls(**arguments)
    except (ValueError, TypeError) as error:
        raise EncodingError(f"{name}: {cls_name} refuses its fields: {error}") from None


def _hints(cls: type) -> dict[str, Any]:
    """The annotated types of the constructor's arguments, by name."""
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return {}
    return {name: hint for name, hint in typing.get_type_hints(cls.__init__).items() if name != "return"}  # type: ignore[misc]


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; unlike in Python, a bool is no number."""
    if isinstance(hint, types.UnionType):
        return any(_is_a(value, one) for one in typing.get_args(hint))
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _lost(name: str, text: Any) -> Any:
    """The value to use for an object of which the file has only the name."""
    if not isinstance(text, str):
        raise EncodingError(f"{name}: expected the name of an object, found {_shown(text)}")
    if name == "random_state":  # a generator: the seed drawn from it is stored separately
        return None
    if name == "dtype":  # files of development versions before 0.1.0
        try:
            return _dtype_name(text)
        except ValueError as error:
            raise EncodingError(f"{name}: {error}") from None
    raise EncodingError(
        f"The model was saved with {name}={text[:200]}, an object of your own class, which a file cannot hold. Give it "
        f"again: AugmentReduceClassifier.load(path, {name}=...)"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
