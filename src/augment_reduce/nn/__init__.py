"""The torch face: an output layer with its loss for networks with very many classes, at a cost that does not know K.

hidden ─► draw classes ─► psi ─► q(v) of each row ─► bound ─► loss; backward: hidden, touched weight rows
          _draw.py        _plain.py | kernels/cuda.py  _local.py            _rows.py
                        all joined in _step.py, where reading starts; head.py is the module
"""

from . import functional
from ._draw import SharedSampler
from .head import AugmentReduceHead

__all__ = ["AugmentReduceHead", "SharedSampler", "functional"]
