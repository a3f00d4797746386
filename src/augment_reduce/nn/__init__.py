"""The torch API: an output layer with its loss for networks with very many classes, at a cost independent of K.

hidden ─► draw classes ─► psi ─► q(v) of each row ─► bound ─► loss; backward: hidden, touched weight rows
          _draw.py        _plain.py | triton/         _local.py            _rows.py
          _columns.py     _step.py calls them all: start there; head.py is the module

head.py uses `_input.py` (arguments), `_autograd.py`, `_exact.py` (the loss of eval()), `_fused.py` (the optimiser) and
`_loading.py` (state dicts). `_bound.py` is the same bound for user-defined scores.
"""

from . import functional
from ._bound import LocalParameters, sampled_bound
from ._draw import SharedSampler
from ._guards import exclude_from_ddp
from ._sharded_state import load_sharded, save_sharded
from .head import AugmentReduceHead

__all__ = [
    "AugmentReduceHead",
    "LocalParameters",
    "SharedSampler",
    "exclude_from_ddp",
    "functional",
    "load_sharded",
    "sampled_bound",
    "save_sharded",
]
