"""The CPU kernels compiled, or loaded from Numba's disk cache, before anybody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Timer

import numpy as np
import torch

from ..optim import SectionFour
from . import _cpu_classes, _cpu_push, cpu
from .reference import Parameters
from .rows import DenseRows, Rows, SparseRows

KERNELS = {
    "pairs": (_cpu_push.push_groups, _cpu_classes.floyd),
    "shared": (_cpu_push.push_groups, _cpu_push.push_blocks, _cpu_classes.floyd),
}


def is_compiled(dtype: torch.dtype = torch.float32, *, shared: bool = False) -> bool:
    """Whether this process has the kernels for weights of that dtype already."""
    name = str(dtype).removeprefix("torch.")
    return all(
        any(name in str(s) for s in kernel.signatures) for kernel in KERNELS["shared" if shared else "pairs"][:-1]
    )


def warm_up(
    X: Rows,
    dtype: torch.dtype = torch.float32,
    *,
    shared: bool = False,
    notify: Callable[[], None] | None = None,
    patience: float = 0.5,
) -> float:
    """Compile, or load from Numba's disk cache, the kernels that a fit on such data uses; returns the seconds taken.

    Calls `notify` once, from another thread, if that lasts longer than `patience` seconds: it is compiling,
    which happens once for all later processes.
    """
    start = time.perf_counter()
    timer = Timer(patience, notify or (lambda: None))
    timer.daemon = True
    timer.start()
    try:
        _small_step(X, dtype, shared)
    finally:
        timer.cancel()
    return time.perf_counter() - start


def _small_step(X: Rows, dtype: torch.dtype, shared: bool) -> None:
    """Every kernel once, on rows of the same kind and dtypes as X."""
    tiny: Rows
    if isinstance(X, DenseRows):
        tiny = DenseRows(np.eye(4, 6, dtype=X.values.dtype))
    else:
        indptr, indices = np.arange(5, dtype=X.indptr.dtype), np.arange(4, dtype=X.indices.dtype)
        tiny = SparseRows(indptr, indices, np.ones(4, X.values.dtype), 6)
    rows, optimizer, weight, bias = (
        np.arange(4),
        SectionFour(),
        torch.zeros(5, 6, dtype=dtype),
        torch.zeros(5, dtype=dtype),
    )
    state = Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
    for uniform in (torch.float32, torch.float64):
        pairs = cpu.draw_without_replacement(torch.zeros(4, 3, dtype=uniform), 5)
    grad = torch.ones(4, 3, dtype=dtype)
    cpu.pair_scores(tiny, rows, pairs, weight, bias)
    if shared:
        cpu.shared_scores(tiny, rows, pairs[0], weight, bias)
        cpu.push_shared(tiny, rows, pairs[0], grad, pairs[:, :1], grad[:, :1], None, None, state, optimizer, 1, None)
    else:
        cpu.push_pairs(tiny, rows, pairs, grad, None, state, optimizer, 1, None)
