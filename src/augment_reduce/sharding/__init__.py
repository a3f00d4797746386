"""Classes sharded over processes: the layout (`layout.py`) and the collectives (`group.py`).

The bound is a sum over classes, so each process sums over its own classes and the sums of all are added up: two or
three numbers a row, whatever K, D and |S| are. The heads of `nn/` and the estimator's steps both use these modules;
`partition.py` puts the two together for the estimator, `chunks.py` orders classes as files have them.
"""

from .group import PendingSum, RankError, Ranks, RankStopped
from .layout import ClassShard
from .partition import Partition

__all__ = ["ClassShard", "Partition", "PendingSum", "RankError", "RankStopped", "Ranks"]
