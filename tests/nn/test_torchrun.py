"""`examples/sharded_head.py`: in one process, and under torchrun with ranks that are killed in mid-step."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks.common import ROOT
from benchmarks.studies import killed_ranks
from benchmarks.studies.killed_ranks import Kill

EVERY, STEPS = 5, 20
CONFIG = killed_ranks.SMALL | {"every": EVERY, "steps": STEPS}


def test_a_run_in_one_process_goes_on_from_its_checkpoint(tmp_path):
    train = killed_ranks.load_example().train
    whole = train(CONFIG)
    config = CONFIG | {"checkpoints": str(tmp_path)}
    train(config | {"steps": 10})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000010"]
    assert train(config) == whole


def test_killed_ranks_cost_at_most_one_interval(tmp_path):
    """One dies at the sums of a step, the other one while a checkpoint is being made: torchrun starts both again."""
    kills = [Kill(rank=1, step=8, collective=3), Kill(rank=0, step=14, collective=9)]
    whole = killed_ranks.run([], STEPS, EVERY, tmp_path / "undisturbed")
    found = killed_ranks.run(kills, STEPS, EVERY, tmp_path / "killed")
    assert len(found.starts) == 3, found.output
    for attempt, kill in enumerate(kills):
        assert 0 <= killed_ranks.lost(kill, found.starts, attempt) <= EVERY
        of_torchrun = f"exitcode: -9) local_rank: {kill.rank}"  # which may end the other one before it has said so
        assert killed_ranks.names_the_dead(found.output, kill.rank) or of_torchrun in found.output
    assert found.likelihood == whole.likelihood  # bit-equal: the same number of ranks
    assert whole.starts == [0]


def test_killed_ranks_study(monkeypatch, tmp_path):
    """The rows of the study, with a run that is not made."""
    runs = []

    def run(kills, steps, every, folder):
        runs.append(kills)
        return killed_ranks.Outcome(-1.0, [0, *(kill.step // every * every for kill in kills)], "")

    monkeypatch.setattr(killed_ranks, "run", run)
    rows = killed_ranks.main(["--kills", "5", "--steps", "100", "--every", "10", "--output", str(tmp_path / "k.csv")])
    assert [len(kills) for kills in runs] == [0, 3, 2]
    assert [row["lost"] for row in rows] == [row["step"] % 10 for row in rows]


def page_block(first_line: str) -> str:
    """The lines of docs/distributed.md that begin so."""
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    found = re.search(rf"```python\n({re.escape(first_line)}.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_that_opens_the_page(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(page_block("# train.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={tmp_path}", "--redirects=3", str(script)]  # a file each: lines of two ranks mix in a pipe
    done = subprocess.run(
        command, timeout=120, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    printed = {path.parent.name: path.read_text() for path in tmp_path.glob("*/*/*/stdout.log")}
    errors = "".join(path.read_text() for path in tmp_path.glob("*/*/*/stderr.log"))
    assert done.returncode == 0, done.stdout + errors
    losses = {rank: re.match(rf"{rank} (\d+\.\d+) \[", text)[1] for rank, text in printed.items()}
    assert losses["0"] == losses["1"]  # of the rows of all ranks


HAVE_RAY = importlib.util.find_spec("ray") is not None
HAVE_SPARK = importlib.util.find_spec("pyspark") is not None and shutil.which("java") is not None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ray", marks=pytest.mark.skipif(not HAVE_RAY, reason="Ray is not a dependency")),
        pytest.param("spark", marks=pytest.mark.skipif(not HAVE_SPARK, reason="needs PySpark and Java")),
    ],
)
def test_launchers_of_the_page(name, tmp_path):
    """The lines of docs/distributed.md, in a process of their own."""
    program = (
        page_block(f"# {name}").replace("/shared/run", str(tmp_path / "run")).replace('"steps": 400', '"steps": 20')
    )
    examples = str(ROOT / "examples")
    path = os.pathsep.join(filter(None, (examples, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=examples, timeout=300, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "held-out log likelihood" in done.stdout
