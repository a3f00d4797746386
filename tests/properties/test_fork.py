"""A child that was forked (multiprocessing's default on Linux, gunicorn --preload) fits, loads and predicts like any
process: threads of the parent do not exist there, and nobody waits for them."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from augment_reduce.kernels import threads

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

PAIRS = """
import os, sys, time
import numpy as np, torch
torch.set_num_threads(4)
from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import threads
threads.default_threads = lambda: 4

file, by_user = sys.argv[1], sys.argv[3] == "True"
X = np.random.default_rng(0).normal(size=(600, 60)).astype(np.float32)
y = np.arange(600) % 600
new = lambda **more: AugmentReduceClassifier(max_iter=3, batch_size=200, random_state=0, n_jobs=4, **more)

def fit():
    return new().fit(X, y).coef_
def load():
    return AugmentReduceClassifier.load(file).coef_
def predict_topk():
    return AugmentReduceClassifier.load(file).predict_topk(X, 5)[1]
def predict_proba():
    return AugmentReduceClassifier.load(file).predict_proba(X[:40])
def paper():
    return new(preset="paper", n_sampled_classes=30).fit(X, y).coef_
def probit():
    return new(model="probit").fit(X, y).predict_proba(X[:40])
def head():
    from augment_reduce.nn import AugmentReduceHead
    torch.manual_seed(0)
    head = AugmentReduceHead(60, 600, optimizer="adagrad")
    hidden = torch.from_numpy(X).requires_grad_()
    for _ in range(2):
        head(hidden, torch.from_numpy(y)).backward()
    return head.topk(hidden.detach(), 3)[1].detach().numpy()

if not os.path.exists(file):
    new().fit(X, y).save(file)
    sys.exit()
parents = {"fit": fit, "load": load, "predict": predict_proba, "head": head}
children = [fit, load, predict_topk, predict_proba, paper, probit, head]
found = parents[sys.argv[2]]()
if by_user:  # torch's own threads are there, and are many
    torch.ones(1_000_000).exp().sum()
expected = []
for child in children:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, np.ascontiguousarray(child()).tobytes()[:60_000])
        os._exit(0)
    os.close(writer)
    expected.append((child, reader))
until = time.monotonic() + 240
hangs = []
for child, reader in expected:
    os.set_blocking(reader, False)
    received = b""
    while time.monotonic() < until:
        try:
            part = os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        if not part:
            break
        received += part
    else:
        hangs.append(child.__name__)
        continue
    assert received == np.ascontiguousarray(child()).tobytes()[:60_000], child.__name__
if hangs:
    print("hangs:", *hangs, flush=True)
    os.killpg(0, 9)
print("all ended, with the numbers of the parent")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    file = tmp_path_factory.mktemp("fork") / "model.safetensors"
    run(file, "fit", False)
    return file


def run(file, parent, by_user):
    """In a session of its own, which ends with it: no child that hangs is left."""
    done = subprocess.run(
        [sys.executable, "-c", PAIRS, str(file), parent, str(by_user)], capture_output=True, text=True, timeout=500,
        start_new_session=True,
    )  # fmt: skip
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("parent", "by_user"), [("fit", False), ("fit", True), ("load", True), ("predict", True), ("head", False)]
)
def test_whatever_parent_and_child_do_the_child_ends(saved, parent, by_user):
    """Each parent with seven children: K x D is 36,000, from which torch would use its threads."""
    said, errors = run(saved, parent, by_user)
    assert said.startswith("all ended"), said + errors


def in_child(function):
    """Its exit code; 99 where it hangs."""
    child = os.fork()
    if child == 0:
        code = 98
        try:
            code = function()
        finally:
            os._exit(code)
    for _ in range(6000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 99


def test_a_child_has_one_torch_thread_also_after_what_restores_them():
    """What is restored in the child is not what the parent had: forked inside of a fit, say, by a user's noise."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert in_child(torch.get_num_threads) == 1
        with threads.one_torch_thread():
            child = os.fork()
        if child == 0:
            os._exit(torch.get_num_threads())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_pool_of_threads_is_begun_anew_in_the_child():
    def shares_work():
        found = []
        with threads.num_threads(3):
            threads.for_each(found.append, range(7))
        return len(found)

    assert shares_work() == 7
    assert in_child(shares_work) == 7


def test_the_thread_that_waits_for_a_fit_may_fork(monkeypatch):
    """In a signal handler, say: the child has no fit to wait for, and says so."""
    from augment_reduce.training import interrupts

    def work(stop_asked):
        while not stop_asked():
            threading.Event().wait(0.001)

    forked = []

    def look_up(job):
        if not forked:
            forked.append(os.fork())
            if forked[0] == 0:
                raise KeyboardInterrupt
            raise ZeroDivisionError
        return real(job)

    real = interrupts.Job.wait
    monkeypatch.setattr(interrupts.Job, "wait", look_up)
    try:
        interrupts.run_whole(work)
    except KeyboardInterrupt:
        os._exit(7)
    except ZeroDivisionError:
        assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 7
