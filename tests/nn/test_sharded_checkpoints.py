"""Checkpoints of heads over ranks: saved on some, loaded on others; damaged ones passed over; no pickle."""

import pickletools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from augment_reduce.nn import AugmentReduceHead, load_sharded, save_sharded
from augment_reduce.nn._sharded_state import ROWS
from augment_reduce.persistence.files import ModelFileError
from tests.helpers.rank_processes import run_on_ranks

D, K = 6, 23


class Network(nn.Module):
    def __init__(self, group: Any = None, n_classes: int = K, optimizer: str | None = "adam") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(D, D)
        self.head = AugmentReduceHead(
            D, n_classes, n_sampled_classes=8, class_counts=1.0 / torch.arange(1, n_classes + 1), optimizer=optimizer,
            process_group=group, generator=torch.Generator().manual_seed(2),
        )  # fmt: skip

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.head(self.trunk(hidden), target)


def optimizer_of(net: Network) -> torch.optim.Optimizer:
    given = net.trunk.parameters() if net.head.optimizer is not None else net.parameters()
    return torch.optim.AdamW(given, lr=0.01)


def train(net: Network, optimizer: torch.optim.Optimizer, steps: range, group: Any = None) -> None:
    """Minibatches of 12 rows, whatever the ranks; gradients of the trunk summed over ranks."""
    rank, n_ranks = (0, 1) if group is None else (group.rank(), group.size())
    for t in steps:
        g = torch.Generator().manual_seed(t)
        hidden, target = torch.randn(12, D, generator=g), torch.randint(net.head.n_classes, (12,), generator=g)
        net(hidden.chunk(n_ranks)[rank], target.chunk(n_ranks)[rank]).backward()
        if group is not None:
            for p in net.trunk.parameters():
                torch.distributed.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


def whole(net: Network) -> dict[str, Tensor]:
    """The state with the rows of all classes."""
    shards = net.head.shards
    state = {name: x.detach().clone() for name, x in net.state_dict().items() if "extra_state" not in name}
    if shards is not None:
        for name, x in state.items():
            if name.removeprefix("head.") in ROWS and len(x):
                state[name] = shards.whole(x)
    return state


KINDS = ("adam", None)


def save_at_10(group: Any, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Train 60 steps with a checkpoint after 10, then again from the checkpoint: bit-equal."""
    found = {}
    for kind in KINDS:
        net, place = Network(group, optimizer=kind), folder / str(kind)
        optimizer = optimizer_of(net)
        train(net, optimizer, range(5), group)
        save_sharded(net, place, 5, optimizer=optimizer)
        train(net, optimizer, range(5, 10), group)
        save_sharded(net, place, 10, optimizer=optimizer, extra={"seed": torch.tensor([7])})
        at_10 = whole(net)
        train(net, optimizer, range(10, 60), group)
        found[f"{kind} at 10"], found[f"{kind} at 60"] = at_10, whole(net)
    for name, state in go_on(group, folder).items():
        for key, x in state.items():
            assert torch.equal(x, found[name][key]), (name, key)
    return found


def go_on(group: Any, folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for kind in KINDS:
        net = Network(group, optimizer=kind)
        optimizer = optimizer_of(net)
        loaded = load_sharded(net, folder / str(kind), optimizer=optimizer)
        assert loaded is not None
        assert loaded.step == 10
        assert loaded.extra["seed"].tolist() == [7]
        at_10 = whole(net)
        train(net, optimizer, range(10, 60), group)
        found[f"{kind} at 10"], found[f"{kind} at 60"] = at_10, whole(net)
    return found


def test_saved_on_two_ranks_goes_on_on_one_and_on_three(tmp_path):
    folder = tmp_path / "checkpoints"
    saved = run_on_ranks(save_at_10, 2, tmp_path, folder)[0]
    for found in (go_on(None, folder), *run_on_ranks(go_on, 3, tmp_path, folder)):
        for name, state in saved.items():
            for key, x in state.items():
                if name.endswith("at 10"):
                    assert torch.equal(found[name][key], x), (name, key)
                else:
                    torch.testing.assert_close(found[name][key], x, rtol=1e-6, atol=1e-6)
    assert not [path for path in folder.rglob("*") if path.is_file() and is_pickle(path)]


def is_pickle(path: Path) -> bool:
    """Whether a file begins with a pickle, or has one where a zip of torch.save would."""
    data = path.read_bytes()
    if data[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return True
    try:
        next(iter(pickletools.genops(data[:64])))
        list(pickletools.genops(data))
    except ValueError:
        return False
    return True


def test_the_newest_two_are_kept_and_damage_is_passed_over(tmp_path):
    folder, net = tmp_path / "checkpoints", Network()
    assert load_sharded(net, folder) is None
    optimizer = optimizer_of(net)
    states = {}
    for step in range(1, 5):
        train(net, optimizer, range(step, step + 1))
        save_sharded(net, folder, step, optimizer=optimizer)
        states[step] = whole(net)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]
    newest = next((folder / "step-00000004").glob("*.safetensors"))
    data = newest.read_bytes()
    for damage, message in ((data[:-7], "damaged"), (None, "lost its file")):
        newest.unlink()
        if damage is not None:
            newest.write_bytes(damage)
        with pytest.warns(RuntimeWarning, match=message):
            loaded = load_sharded(net, folder)
        assert loaded is not None
        assert loaded.step == 3
        assert torch.equal(net.head.weight, states[3]["head.weight"])
    (folder / "step-00000003" / "manifest.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"Expected a checkpoint in .* that is whole"):
        load_sharded(net, folder)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_sharded(Network(), tmp_path, 1)
    for other, name in ((Network(n_classes=K + 1), "bias"), (Network(optimizer="adagrad"), "optimizer")):
        with pytest.raises(ModelFileError, match=f"Expected head.{name}.* it is of another model"):
            load_sharded(other, tmp_path)
    shutil.rmtree(tmp_path / "step-00000001")
    assert load_sharded(Network(), tmp_path) is None
