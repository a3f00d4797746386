"""Checkpoints of a fit with sharded classes: a folder in which each rank writes the rows of its own classes.

    step-000000012000/shard-00001-model-....safetensors, ...    the arrays of a model file, and `late` (`Fitted.late`)
                      manifest.json                             with the description of a model file

Any number of ranks, or one process, can resume from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..sharding import ClassShard, Partition, Ranks
from ..sharding.chunks import Chunks
from ..training.fitted import Fitted
from . import rank_files, saving
from .files import ModelFileError

ROWS = re.compile(r"(weight|bias)(_state\.\d+)?|best\.(weight|bias)")  # arrays with a row for each class


def save(estimator: saving.Estimator, path: Path, partition: Partition) -> None:
    """Write the current state. Collective; an error on one rank is raised on all."""
    ranks = partition.ranks
    with torch.inference_mode(False):  # the fit runs in it; torch.distributed.checkpoint needs normal tensors
        description: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        with ranks.agree_on_errors("the checks of a checkpoint"):
            description, tensors = saving.checked_contents(estimator, partition.shard.n_classes)
        chunks = Chunks(ranks, partition.shard)
        for name in tensors:
            tensors[name] = rank_files.in_order(chunks, tensors[name]) if ROWS.fullmatch(name) else tensors[name]
        rank_files.write(ranks, path, tensors, {"description": description})


def load(
    estimator: saving.Estimator, path: Path, ranks: Ranks, partition: Partition | None
) -> tuple[Fitted | None, str]:  # fmt: skip
    """(the state or None, a description of the damage or ""), the same decision on every rank. Collective."""
    manifest, problem = rank_files.read_manifest(path)
    if problem := _told(ranks, problem):
        return None, problem
    if problem := _told(ranks, rank_files.damage(ranks, path, manifest)):
        return None, problem
    n_classes = len(estimator.classes_)
    chunks = Chunks(ranks, ClassShard(n_classes, ranks.rank, ranks.size))
    places: dict[str, Tensor] = {}
    try:
        places = _places(path, manifest, chunks)
    except (ModelFileError, KeyError, TypeError, ValueError) as error:
        problem = f"{path / rank_files.MANIFEST} cannot be used ({error})."
    if problem := _told(ranks, problem):
        return None, problem
    rank_files.read(ranks, path, places)
    tensors = {name: rank_files.own_rows(chunks, x) if ROWS.fullmatch(name) else x for name, x in places.items()}
    fitted = None
    try:
        description = manifest.get("description")
        if not isinstance(description, dict):
            raise ModelFileError(f"{path}: description: expected a table of entries.")
        fitted = saving.fitted_of(estimator, path, description, tensors, n_classes)
        fitted.partition = partition
    except ModelFileError as error:
        problem = str(error)
    problem = _told(ranks, problem)
    return (None if problem else fitted), problem


def _told(ranks: Ranks, problem: str) -> str:
    """The first problem that a rank reports, or ""; the same on every rank."""
    return next((text for text in ranks.gather_text(problem, "checking a checkpoint") if text), "")


def _places(path: Path, manifest: dict[str, Any], chunks: Chunks) -> dict[str, Tensor]:
    """Empty tensors for the contents of a checkpoint; ModelFileError if its number of classes differs."""
    K = chunks.shard.n_classes
    places = {}
    for name, (kind, shape) in manifest["tensors"].items():
        of_rows = ROWS.fullmatch(name) is not None
        if of_rows and (not shape or shape[0] != K):
            raise ModelFileError(f"Expected {name} of {K} classes, found shape {shape}")
        places[name] = rank_files.place_for(chunks if of_rows else None, rank_files.dtype_of(kind), tuple(shape))
    return places
