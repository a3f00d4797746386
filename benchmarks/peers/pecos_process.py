"""PECOS XR-Linear on the files of a folder, for libraries.py: a process of its own, since PECOS 1.2 needs NumPy 1.

Reads X.npz, Y.npz (training), rows.npz (for guesses), test.npz and y.npy (for the likelihood). Writes top.npy (five of
each row), own.npy and total.npy (the score of each test example's label, and the sum over all labels, nothing pruned);
prints the seconds of training, tree included.
"""

import sys
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel

PAIRS = 5_000_000  # (row, label) scores held at once

folder = Path(sys.argv[1])
X, Y, rows, test = (
    sp.load_npz(folder / f"{name}.npz").astype(np.float32).tocsr() for name in ("X", "Y", "rows", "test")
)
started = time.perf_counter()
features = LabelEmbeddingFactory.create(Y, X, method="pifa")
model = XLinearModel.train(X, Y, C=Indexer.gen(features, threads=2), threads=2)
seconds = time.perf_counter() - started

scores = model.predict(rows, only_topk=5, threads=2).tocsr()
top = np.zeros((rows.shape[0], 5), dtype=np.int64)
for i in range(rows.shape[0]):
    entries = slice(scores.indptr[i], scores.indptr[i + 1])
    best = scores.indices[entries][np.argsort(-scores.data[entries])][:5]
    top[i, : len(best)] = best
np.save(folder / "top.npy", top)

labels, n_classes = np.load(folder / "y.npy"), Y.shape[1]
own, total = np.zeros(len(labels)), np.zeros(len(labels))
step = max(1, PAIRS // n_classes)
for start in range(0, len(labels), step):
    block = slice(start, min(start + step, len(labels)))
    scores = model.predict(test[block], only_topk=n_classes, beam_size=n_classes, threads=2).tocsr()
    own[block] = np.asarray(scores[np.arange(scores.shape[0]), labels[block]]).ravel()
    total[block] = np.asarray(scores.sum(axis=1)).ravel()
np.save(folder / "own.npy", own)
np.save(folder / "total.npy", total)
print(seconds)
