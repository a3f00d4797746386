"""The torch face: an output layer with its loss for networks with very many classes, at a cost that does not know K.

hidden ─► draw classes ─► psi ─► q(v) of each row ─► bound ─► loss; backward: hidden, touched weight rows
          _draw.py        _plain.py | triton/         _local.py            _rows.py
          _columns.py     all joined in _step.py, where reading starts; head.py is the module

head.py: `_input.py` what it is given, `_autograd.py` into autograd, `_exact.py` in eval(), `_fused.py` its optimiser,
`_loading.py` its state. `_bound.py` is the same bound for scores of your own.
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
