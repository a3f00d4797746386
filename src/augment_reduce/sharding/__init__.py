"""Classes sharded over processes: the layout (`layout.py`) and the collectives (`group.py`).

The bound is a sum over classes, so each process sums over its own classes and the sums are all-reduced: two or three
numbers a row, independent of K, D and |S|. The heads of `nn/` and the estimator's steps use these modules;
`partition.py` combines the two for the estimator, `chunks.py` converts to and from the order of classes in files.
"""

from .group import PendingSum, RankError, Ranks, RankStopped
from .layout import ClassShard
from .partition import Partition

__all__ = ["ClassShard", "Partition", "PendingSum", "RankError", "RankStopped", "Ranks"]
