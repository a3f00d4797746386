"""Folders of tensors, written collectively by the ranks and read by any number of ranks.

    folder/shard-00001-model-....safetensors    tensors, by torch.distributed.checkpoint
           manifest.json                        shapes, dtypes, files with sizes and SHA-256; written last

Tensors with a row for each class are stored in the order of the classes, independent of the number of ranks; each rank
writes a chunk of consecutive classes. Other tensors are the same on every rank, and stored once. No pickle.

The folder is written under a hidden name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._version import __version__
from ..sharding import Ranks
from ..sharding.chunks import Chunks
from ..support.atomic import sync_folder
from .files import ModelFileError
from .tensor_file import parse_json

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MANIFEST, FORMAT = "manifest.json", 1
BYTES_AT_ONCE = 1 << 24


# torch.distributed.checkpoint and DTensor take .6 s to import, so they are imported at the first use.


def hugging_face(name: str) -> Callable[..., Any]:
    import torch.distributed.checkpoint as dcp

    found = getattr(dcp, name, None)
    if found is None:
        raise ImportError(
            f"Checkpoints over ranks need torch.distributed.checkpoint.{name}, which torch {torch.__version__} lacks. "
            "Upgrade torch to 2.8 or later; or save the model in one file of all classes, which one process can load."
        )
    return found


def as_dtensor(chunks: Chunks, chunk: Tensor, shape: tuple[int, ...]) -> DTensor:
    """The tensor of all classes, from this rank's chunk; `shape[1:]` is the shape of a row."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.Size((chunks.shard.n_classes, *shape[1:]))
    stride = torch.empty(whole, device="meta").stride()
    mesh = DeviceMesh.from_group(chunks.ranks.group, chunk.device.type)  # type: ignore[arg-type]
    return DTensor.from_local(chunk, mesh, [Shard(0)], run_check=False, shape=whole, stride=stride)


def in_order(chunks: Chunks, own: Tensor) -> Tensor:
    """The rows of this rank's classes in the order of files: a DTensor, unless there is one rank."""
    if chunks.ranks.size == 1:
        return own
    return as_dtensor(chunks, chunks.to_chunks(own.detach().contiguous()), tuple(own.shape))


def own_rows(chunks: Chunks, found: Tensor) -> Tensor:
    """The inverse of `in_order`."""
    return found if chunks.ranks.size == 1 else chunks.from_chunks(found.to_local())  # type: ignore[attr-defined]


def place_for(chunks: Chunks | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor to read into; `chunks` if it has a row for each class, else None."""
    if chunks is None or chunks.ranks.size == 1:
        return torch.zeros(shape, dtype=dtype)
    return as_dtensor(chunks, torch.zeros(len(chunks), *shape[1:], dtype=dtype), shape)


# ---- writing ----


def write(ranks: Ranks, target: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write `tensors` and `facts` (of JSON types; those of the first rank are stored) to the folder `target`.

    Collective. An error on one rank is raised on all, and does not affect earlier checkpoints.
    """
    import torch.distributed.checkpoint as dcp

    writer = hugging_face("HuggingFaceStorageWriter")
    part = target.with_name(f".{target.name}.part")
    with ranks.agree_on_errors("making a checkpoint's folder"):
        if ranks.rank == 0:
            for left in target.parent.glob(".step-*.part"):  # of interrupted writes
                shutil.rmtree(left, ignore_errors=True)
            part.mkdir(parents=True)
    with together(ranks, "writing a checkpoint"):
        dcp.save(
            {name: x for name, x in tensors.items() if x.numel()}, process_group=ranks.group, no_dist=ranks.size == 1,
            storage_writer=writer(str(part), save_distributed=True),
        )  # fmt: skip
    digests: dict[str, str] = {}
    with ranks.agree_on_errors("reading a checkpoint back"):
        digests = _digests(ranks, part)
    for of_rank in ranks.gather_text(json.dumps(digests), "the checksums of a checkpoint"):
        digests |= json.loads(of_rank)
    with ranks.agree_on_errors("finishing a checkpoint"):
        if ranks.rank == 0:
            _write_manifest(part, tensors, digests, facts)
            remove(target)
            part.rename(target)
            sync_folder(target.parent)


def remove(folder: Path) -> None:
    """Remove a checkpoint; atomic for readers, since it is renamed first."""
    hidden = folder.with_name(f".{folder.name}.old.part")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _write_manifest(
    part: Path, tensors: Mapping[str, Tensor], digests: dict[str, str], facts: Mapping[str, Any]
) -> None:  # fmt: skip
    manifest = {
        "format": FORMAT, "version": __version__,
        "tensors": {name: [str(x.dtype), list(x.shape)] for name, x in tensors.items()},
        "files": {path.name: path.stat().st_size for path in part.iterdir()},
        "sha256": digests,
    } | dict(facts)  # fmt: skip
    with open(part / MANIFEST, "w", encoding="utf-8") as out:
        json.dump(manifest, out, default=float)
        out.flush()
        os.fsync(out.fileno())
    sync_folder(part)


def _digests(ranks: Ranks, folder: Path) -> dict[str, str]:
    """SHA-256 of this rank's share of the files: each file is read by one rank."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    return {name: _digest(folder / name) for name in names[ranks.rank :: ranks.size]}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BYTES_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def together(ranks: Ranks, what: str) -> Iterator[None]:
    """For calls of torch.distributed.checkpoint: an error on one rank is raised on all, as an OSError."""
    from torch.distributed.checkpoint.api import CheckpointException

    with ranks.agree_on_errors(what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}") from error


# ---- reading ----


def read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """(the manifest, a description of the damage or "")."""
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return {}, f"{path} is of format {manifest['format']}, this version reads {FORMAT}."
        for name, size in manifest["files"].items():
            if Path(name).name != name:
                return {}, f"{path / MANIFEST} names a file outside its folder: {name!r}."
            if not (path / name).is_file():
                return {}, f"{path} has lost its file {name}."
            if (path / name).stat().st_size != size:
                found = (path / name).stat().st_size
                return {}, f"{path / name} is damaged: expected {size} bytes, found {found}."
        needed = sum(_bytes_of(kind, shape) for kind, shape in manifest["tensors"].values())
        if needed > sum(manifest["files"].values()):
            return {}, f"{path / MANIFEST} names tensors of {needed:,} bytes, more than its files have."
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{path / MANIFEST} cannot be read ({type(error).__name__}: {error})."
    return manifest, ""


def damage(ranks: Ranks, path: Path, manifest: dict[str, Any]) -> str:
    """A description of the damage in this rank's share of the files, by their checksums, or ""."""
    try:
        for name, digest in _digests(ranks, path).items():
            if manifest.get("sha256", {}).get(name, digest) != digest:
                return f"{path / name} is damaged: its checksum is another."
    except OSError as error:
        return f"{path} cannot be read ({error})."
    return ""


def read(ranks: Ranks, path: Path, places: Mapping[str, Tensor]) -> None:
    """Read into the tensors `places`. Collective."""
    import torch.distributed.checkpoint as dcp

    with together(ranks, f"reading {path}"):
        dcp.load(
            {name: x for name, x in places.items() if x.numel()}, process_group=ranks.group, no_dist=ranks.size == 1,
            storage_reader=hugging_face("HuggingFaceStorageReader")(str(path)),
        )  # fmt: skip


def read_alone(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(manifest, tensors of all classes), read by one process; ModelFileError if the folder is damaged."""
    ranks = Ranks(None)
    manifest, problem = read_manifest(path)
    problem = problem or damage(ranks, path, manifest)
    if problem:
        raise ModelFileError(problem)
    kinds = manifest["tensors"].items()
    places = {name: place_for(None, dtype_of(kind), tuple(shape)) for name, (kind, shape) in kinds}
    read(ranks, path, places)
    return manifest, places


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelFileError(f"Expected the name of a dtype in a checkpoint's manifest, found {name!r}.")
    return found


def _bytes_of(kind: str, shape: list[int]) -> int:
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"a tensor of shape {shape}")
    return math.prod(shape) * torch.empty(0, dtype=dtype_of(kind)).element_size()
