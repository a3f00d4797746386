"""PECOS XR-Linear on the files of a folder, for bench_quality.py: a process of its own, since PECOS 1.2 needs NumPy 1.

Reads X.npz, Y.npz, test.npz; writes top.npy (rows, 5) and prints the seconds of training, tree included.
"""

import sys
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel

folder = Path(sys.argv[1])
X, Y, test = (sp.load_npz(folder / f"{name}.npz").astype(np.float32).tocsr() for name in ("X", "Y", "test"))
started = time.perf_counter()
features = LabelEmbeddingFactory.create(Y, X, method="pifa")
model = XLinearModel.train(X, Y, C=Indexer.gen(features, threads=2), threads=2)
seconds = time.perf_counter() - started
scores = model.predict(test, only_topk=5, threads=2).tocsr()
top = np.zeros((test.shape[0], 5), dtype=np.int64)
for i in range(test.shape[0]):
    entries = slice(scores.indptr[i], scores.indptr[i + 1])
    best = scores.indices[entries][np.argsort(-scores.data[entries])][:5]
    top[i, : len(best)] = best
np.save(folder / "top.npy", top)
print(seconds)
