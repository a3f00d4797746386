"""Range checks for numbers passed to constructors."""

from __future__ import annotations

import math
import numbers
from typing import Any

MOST_NODES = 256  # nodes of a quadrature rule: eigenvalues of a matrix of that size


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, whole: bool = False) -> None:
    """Refuse what is not a finite number from low to high."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) and low <= float(value) <= high:
        return
    upper = "" if high == math.inf else f" to {high:g}"
    lower = "" if low == -math.inf else f" from {low:g}{upper or ' up'}"
    raise ValueError(f"Expected {name} to be a {'whole' if whole else 'finite'} number{lower}, found {value!r}.")
