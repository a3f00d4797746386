"""Checkpoints of networks with sharded heads: saved on R ranks, loaded on any number.

    folder/step-00000120/shard-00001-model-....safetensors      tensors, by torch.distributed.checkpoint
                         manifest.json                          shapes, dtypes and files; written last

`persistence.rank_files` writes and reads the files; this module selects the tensors with rows of classes.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..persistence import rank_files
from ..persistence.files import ModelFileError
from ..sharding import Ranks
from ._shards import Shards
from .head import AugmentReduceHead

STEP = re.compile(r"step-(\d{8,})")
ROWS = ("weight", "bias", *(f"optimizer.{x}" for x in ("first", "second", "first_bias", "second_bias", "last")))


class Loaded(NamedTuple):
    """The `step` of a checkpoint, and the tensors that were saved as `extra`."""

    step: int
    extra: dict[str, Tensor]


def save_sharded(
    model: nn.Module, folder: str | Path, step: int, *, optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Tensor] | None = None, keep: int = 2,
) -> Path:  # fmt: skip
    """Save a network as `folder/step-...`; the newest `keep` are kept, older ones removed. Collective: on all ranks.

    `optimizer`: a torch optimiser of (some of) its parameters; `extra`: tensors that are the same on every rank, such
    as the state of a generator. An interrupted save does not affect earlier checkpoints.
    """
    shards, ranks = _shards_of(model)
    target = Path(folder) / f"step-{step:08d}"
    state = _State(model, shards, optimizer).tensors()
    state |= {f"extra.{name}": x for name, x in (extra or {}).items()}
    groups = [] if optimizer is None else optimizer.state_dict()["param_groups"]
    rank_files.write(ranks, target, state, {"step": step, "param_groups": groups})
    with ranks.agree_on_errors("removing old checkpoints"):
        for old in _steps(Path(folder))[:-keep] if ranks.rank == 0 else ():
            rank_files.remove(old)
    return target


def load_sharded(
    model: nn.Module, folder: str | Path, *, optimizer: torch.optim.Optimizer | None = None
) -> Loaded | None:
    """Load the newest checkpoint in `folder` into `model` (and `optimizer`); None if there is none. An incomplete one
    is skipped with a warning, and the previous one is loaded. Collective: on all ranks."""
    shards, ranks = _shards_of(model)
    names = ranks.gather_text(json.dumps([path.name for path in _steps(Path(folder))]), "looking for checkpoints")
    problems: list[str] = []
    for name in reversed(json.loads(names[0])):
        path = Path(folder) / name
        manifest, problem = rank_files.read_manifest(path)
        told = [text for text in ranks.gather_text(problem, "checking a checkpoint") if text]
        if not told:
            problem = rank_files.damage(ranks, path, manifest)
            told = [text for text in ranks.gather_text(problem, "checking a checkpoint") if text]
        if not told:
            for text in problems:
                warnings.warn(f"{text} Going on from {path}.", RuntimeWarning, stacklevel=2)
            return _load(model, shards, ranks, path, manifest, optimizer)
        problems.append(told[0])
    if problems:
        raise ModelFileError(f"Expected a checkpoint in {folder} that is whole. {' '.join(problems)}")
    return None


def _load(
    model: nn.Module, shards: dict[str, Shards], ranks: Ranks, path: Path, manifest: dict[str, Any],
    optimizer: torch.optim.Optimizer | None,
) -> Loaded:  # fmt: skip
    state = _State(model, shards, optimizer)
    with ranks.agree_on_errors(f"loading {path}"):
        wanted = state.places_for(path, manifest)
    rank_files.read(ranks, path, wanted)
    extra = {name.removeprefix("extra."): x for name, x in wanted.items() if name.startswith("extra.")}
    state.take(wanted, manifest["param_groups"])
    return Loaded(manifest["step"], extra)


class _State:
    """The tensors of a model and an optimiser as stored in files: rows of classes as DTensors, in the order of
    classes."""

    def __init__(self, model: nn.Module, shards: dict[str, Shards], optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.of_rows = {f"model.{head}{name}": found for head, found in shards.items() for name in ROWS}
        parameters = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        own = {id(p): (shards[head], p.shape) for head in shards for p in _rows_of(model, head)}
        self.of_parameter = {i: own[id(p)] for i, p in enumerate(parameters) if id(p) in own}

    def _shards_of(self, name: str) -> Shards | None:
        """The shards of a tensor with one row a class."""
        if name.startswith("optimizer."):
            found = self.of_parameter.get(int(name.split(".")[2]))
            return None if found is None else found[0]
        return self.of_rows.get(name)

    def _own(self) -> dict[str, Tensor]:
        with warnings.catch_warnings():  # targets out of range: train() raises
            warnings.simplefilter("ignore")
            found = {f"model.{name}": x for name, x in self.model.state_dict().items()}
        if self.optimizer is not None:
            for i, values in self.optimizer.state_dict()["state"].items():
                found |= {f"optimizer.state.{i}.{key}": torch.as_tensor(x) for key, x in values.items()}
        return found

    def tensors(self) -> dict[str, Tensor]:
        return {name: self._in_order(name, x) for name, x in self._own().items()}

    def _in_order(self, name: str, own: Tensor) -> Tensor:
        shards = self._shards_of(name)
        if shards is None or shards.ranks.size == 1 or own.shape[:1] != (len(shards.layout),):
            return own
        return rank_files.in_order(shards.chunks, own)

    def places_for(self, path: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
        """Empty tensors for the contents of a checkpoint; ModelFileError if it is of another model."""
        stored = {
            name: (rank_files.dtype_of(kind), tuple(shape)) for name, (kind, shape) in manifest["tensors"].items()
        }
        own = {name: (x.dtype, tuple(x.shape)) for name, x in self.tensors().items() if name.startswith("model.")}
        found = {name: facts for name, facts in stored.items() if name.startswith("model.")}
        for name in sorted(own.keys() | found.keys()):
            if own.get(name) != found.get(name):
                raise ModelFileError(
                    f"Expected {name.removeprefix('model.')} of {_described(own.get(name))} in {path}, found "
                    f"{_described(found.get(name))}: it is of another model. Construct the model as the saved one was."
                )
        kept = {
            name: facts for name, facts in stored.items() if self.optimizer is not None or name[:10] != "optimizer."
        }
        return {name: self._place(name, *facts) for name, facts in kept.items()}

    def _place(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        shards = self._shards_of(name)
        if shards is None or shards.ranks.size == 1 or not shape or shape[0] != shards.layout.n_classes:
            return rank_files.place_for(None, dtype, shape)
        return rank_files.place_for(shards.chunks, dtype, shape)

    def take(self, found: dict[str, Tensor], groups: list[dict[str, Any]]) -> None:
        own = {name: self._from_order(name, x) for name, x in found.items()}
        self.model.load_state_dict({name[6:]: x for name, x in own.items() if name.startswith("model.")})
        if self.optimizer is None:
            return
        state: dict[int, dict[str, Tensor]] = {}
        for name, x in own.items():
            if name.startswith("optimizer.state."):
                i, key = name.split(".", 3)[2:]
                state.setdefault(int(i), {})[key] = x
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _from_order(self, name: str, x: Tensor) -> Tensor:
        shards = self._shards_of(name)
        return x if shards is None or not hasattr(x, "to_local") else rank_files.own_rows(shards.chunks, x)


def _shards_of(model: nn.Module) -> tuple[dict[str, Shards], Ranks]:
    """The sharded heads of a model, by the prefix of their names, and their ranks."""
    heads = {name: x for name, x in model.named_modules() if isinstance(x, AugmentReduceHead)}
    shards = {f"{name}." if name else "": x.shards for name, x in heads.items() if x.shards is not None}
    if shards:
        return shards, next(iter(shards.values())).ranks
    alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    if alone:
        return {}, Ranks(None)
    raise ValueError("Expected a model with a head that has a process_group: nothing else here is saved by all ranks.")


def _rows_of(model: nn.Module, prefix: str) -> list[nn.Parameter]:
    return list(model.get_submodule(prefix.rstrip(".")).parameters(recurse=False))


def _steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _described(facts: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if facts is None else f"shape {facts[1]} in {facts[0]}"
