"""What memory is left: of the machine, of control groups of both versions, of resource limits; errors with sizes."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.config import validation
from augment_reduce.support import limits

GB = 1 << 30
MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   {} kB\n"
MOUNT_2 = "30 23 0:28 {top} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_1 = "32 31 0:29 {top} {at} rw,relatime - cgroup cgroup rw,memory\n"
OTHERS = (
    "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def tree(root, *, available=20 * GB, cgroup="", mounts="", files=None):
    """proc and sys as a process sees them."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(available // 1024))
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(OTHERS + mounts)
    for name, content in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def group_2(folder, limit="max", current=0, inactive_file=0, high="max"):
    here = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{here}/memory.max": limit, f"{here}/memory.high": high, f"{here}/memory.current": current,
        f"{here}/memory.stat": f"anon 5\nfile 7\ninactive_file {inactive_file}\nactive_file 11",
    }  # fmt: skip


def group_1(folder, limit=9223372036854771712, usage=0, inactive_file=0, above=None, at="sys/fs/cgroup/memory"):
    here = f"{at}/{folder}".rstrip("/")
    above = limit if above is None else above
    return {
        f"{here}/memory.limit_in_bytes": limit, f"{here}/memory.usage_in_bytes": usage,
        f"{here}/memory.stat": (
            f"cache 3\ninactive_file 1\nhierarchical_memory_limit {above}\ntotal_inactive_file {inactive_file}"
        ),
    }  # fmt: skip


ROOT_2, ROOT_1 = MOUNT_2.format(top="/", at="/sys/fs/cgroup"), MOUNT_1.format(top="/", at="/sys/fs/cgroup/memory")
DOCKER_1 = MOUNT_1.format(top="/docker/abc", at="/sys/fs/cgroup/memory")
CASES = {
    "no groups": ({}, 20 * GB),
    "no limit": ({"cgroup": "0::/a\n", "mounts": ROOT_2, "files": group_2("a", current=GB)}, 20 * GB),
    "version 2": ({"cgroup": "0::/a\n", "mounts": ROOT_2, "files": group_2("a", 3 * GB, GB)}, 2 * GB),
    "files give way": ({"cgroup": "0::/a\n", "mounts": ROOT_2, "files": group_2("a", 3 * GB, 2 * GB, GB)}, 2 * GB),
    "slowed down": ({"cgroup": "0::/a\n", "mounts": ROOT_2, "files": group_2("a", 9 * GB, GB, high=4 * GB)}, 3 * GB),
    "of the machine": (
        {"cgroup": "0::/a\n", "mounts": ROOT_2, "files": group_2("a", 9 * GB, GB), "available": 5 * GB}, 5 * GB
    ),
    "of a group above": (
        {
            "cgroup": "0::/a/b/c\n", "mounts": ROOT_2,
            "files": group_2("a", 4 * GB, 3 * GB) | group_2("a/b") | group_2("a/b/c", 8 * GB, GB),
        }, GB,
    ),
    "the innermost": (
        {
            "cgroup": "0::/a/b\n", "mounts": ROOT_2,
            "files": group_2("a", 9 * GB, 3 * GB) | group_2("a/b", 2 * GB, 0),
        }, 2 * GB,
    ),
    "a container's own view": ({"cgroup": "0::/\n", "mounts": ROOT_2, "files": group_2("", 3 * GB, GB)}, 2 * GB),
    "more than all taken": ({"cgroup": "0::/a\n", "mounts": ROOT_2, "files": group_2("a", GB, 2 * GB)}, 0),
    "more files than taken": ({"cgroup": "0::/a\n", "mounts": ROOT_2, "files": group_2("a", GB, GB, 2 * GB)}, GB),
    "version 1": (
        {"cgroup": "4:memory:/a\n3:cpuset:/x\n", "mounts": ROOT_1, "files": group_1("a", 3 * GB, GB)}, 2 * GB
    ),
    "version 1, no limit": ({"cgroup": "4:memory:/a\n", "mounts": ROOT_1, "files": group_1("a", usage=GB)}, 20 * GB),
    "version 1, files": (
        {"cgroup": "4:memory:/a\n", "mounts": ROOT_1, "files": group_1("a", 3 * GB, 2 * GB, GB)}, 2 * GB
    ),
    "version 1, a limit above that is not seen": (
        {"cgroup": "4:memory:/a\n", "mounts": ROOT_1, "files": group_1("a", usage=GB, above=4 * GB)}, 3 * GB
    ),
    "version 1 in a container": (
        {"cgroup": "4:memory:/docker/abc\n", "mounts": DOCKER_1, "files": group_1("", 3 * GB, GB)}, 2 * GB
    ),
    "version 1 in a container, below": (
        {
            "cgroup": "4:memory:/docker/abc/d\n", "mounts": DOCKER_1,
            "files": group_1("", 3 * GB, GB) | group_1("d", 2 * GB, GB),
        }, GB,
    ),
    "the host's path in a container": (
        {"cgroup": "4:memory:/kubepods/xyz\n", "mounts": DOCKER_1, "files": group_1("", 3 * GB, GB)}, 2 * GB
    ),
    "both versions": (
        {
            "cgroup": "4:memory:/a\n1:name=systemd:/a\n0::/a\n",
            "mounts": ROOT_1 + MOUNT_2.format(top="/", at="/sys/fs/cgroup/unified"), "files": group_1("a", 3 * GB, GB),
        }, 2 * GB,
    ),
    "memory among others": (
        {
            "cgroup": "4:cpu,memory:/a\n", "mounts": ROOT_1.replace("rw,memory", "rw,cpu,memory"),
            "files": group_1("a", 3 * GB, GB),
        }, 2 * GB,
    ),
    "a folder with a blank": (
        {
            "cgroup": "4:memory:/a\n", "mounts": MOUNT_1.format(top="/", at="/my\\040groups"),
            "files": group_1("a", 3 * GB, GB, at="my groups"),
        }, 2 * GB,
    ),
    "no word of mounts": ({"cgroup": "0::/a\n", "mounts": "", "files": group_2("a", 3 * GB, GB)}, 2 * GB),
    "nonsense": (
        {
            "cgroup": "x\n\n::\n0::/../../a\n", "mounts": "nonsense\n - \n" + ROOT_2,
            "files": group_2("", "?", "?"),
        }, 20 * GB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_left(case, tmp_path):
    settings, expected = CASES[case]
    assert limits.available_bytes(tree(tmp_path, **settings)) == pytest.approx(expected, abs=1024)


def test_a_system_that_says_nothing_is_not_asked(tmp_path):
    assert limits.available_bytes(tmp_path) is None


def test_this_machine_says_something():
    assert limits.available_bytes() > 0


def a_fit(**settings):
    X = sp.random(400, 20_000, density=0.001, random_state=0, format="csr", dtype=np.float32)
    return AugmentReduceClassifier(max_iter=2, random_state=0, **settings), X, np.arange(400) % 200


def test_a_fit_that_a_group_would_be_killed_for_is_refused_with_sizes(monkeypatch, tmp_path):
    """fit, partial_fit, a fit that goes on, load and predictions, each before anything is allocated."""
    clf, X, y = a_fit(warm_start=True, early_stopping=True)
    clf.fit(X, y).save(tmp_path / "m")
    left = [10**6]
    monkeypatch.setattr(limits, "available_bytes", lambda *_: left[0])
    for new in (a_fit()[0].fit, lambda X, y: a_fit()[0].partial_fit(X, y, classes=np.arange(200))):
        with pytest.raises(MemoryError, match=r"needs about 0\.0\d GB \(.*weights 0\.02 GB.*0\.00 GB are available"):
            new(X, y)
    with pytest.raises(MemoryError, match=r"needs about 0\.0\d GB more"):
        clf.fit(X, y)
    with pytest.raises(MemoryError, match="GB more"):
        clf.set_params(early_stopping=False).partial_fit(X, y)
    with pytest.raises(MemoryError, match=r"model in .*m needs about 0\.0\d GB"):
        AugmentReduceClassifier.load(tmp_path / "m")
    for name in ("predict_proba", "predict", "decision_function", "predict_log_proba"):
        with pytest.raises(MemoryError, match=r"needs about .* for 4,000 rows and 200 classes"):
            getattr(clf, name)(sp.vstack([X] * 10).tocsr())
    left[0] = 10 * GB
    assert AugmentReduceClassifier.load(tmp_path / "m").n_iter_ == clf.n_iter_
    assert clf.predict_proba(X).shape == (400, 200)


def test_small_fits_do_not_ask_for_room_to_compile_and_large_ones_do(monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda *_: 100 << 20)
    assert limits.shortage(90 << 20) is None
    monkeypatch.setattr(limits, "available_bytes", lambda *_: 2 * GB)
    assert limits.shortage(2 * GB - limits.OVERHEAD // 2) is not None
    assert limits.shortage(2 * GB - 2 * limits.OVERHEAD) is None


def test_where_nobody_knows_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda *_: None)
    assert limits.shortage(10**18) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 5 GiB"), OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("can't start new thread"),
    ],
    ids=lambda error: str(error)[:20],
)  # fmt: skip
def test_whatever_says_that_there_is_no_memory_says_it_alike(error, monkeypatch):
    clf, X, y = a_fit()

    def fails(*_, **__):
        raise error

    monkeypatch.setattr("augment_reduce.training.fitted.zeros", fails)
    with pytest.raises(MemoryError, match=r"This fit needs about 0\.\d\d GB, of which .* GB are left"):
        clf.fit(X, y)
    assert not hasattr(clf, "classes_")
    monkeypatch.undo()
    monkeypatch.setattr("augment_reduce.training.fit.make_problem", fails)
    with pytest.raises(MemoryError, match="This fit needs about"):
        clf.fit(X, y)


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "no"), RuntimeError("another"), ValueError("alloc_cpu")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, limits.memory_errors("This", 5):
        raise error
    assert raised.value is error


UNDER_A_LIMIT = """
import resource, sys
import numpy as np, scipy.sparse as sp
from augment_reduce import AugmentReduceClassifier
from augment_reduce.support import limits
import augment_reduce.estimator, augment_reduce.training.looks
X = sp.random(400, 40_000, density=0.001, random_state=0, format="csr", dtype=np.float32)
y = np.arange(400) % 200
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
kind = getattr(resource, sys.argv[1])
room = int(sys.argv[2]) << 20
resource.setrlimit(kind, (used + room, resource.RLIM_INFINITY))
try:
    clf = AugmentReduceClassifier(max_iter=3, random_state=0, n_jobs=2).fit(X, y)
    clf.predict_topk(X, 3)
    print("fitted")
except MemoryError as error:
    print("MemoryError", error)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only where the system tells")
@pytest.mark.parametrize(("kind", "room"), [("RLIMIT_AS", 40), ("RLIMIT_AS", 400), ("RLIMIT_AS", 8_000)])
def test_under_a_limit_of_address_space_it_is_a_memory_error_with_sizes(kind, room):
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, kind, str(room)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if room == 8_000:
        assert done.stdout.startswith("fitted")
    else:
        assert "needs about 0.0" in done.stdout
        assert "GB are available" in done.stdout


def test_the_estimate_covers_what_is_kept():
    """Weights, states, tables: what a fit holds at its end is no more than was said before."""
    X = sp.random(500, 30_000, density=0.001, random_state=0, format="csr", dtype=np.float32)
    for settings in ({}, {"optimizer": "adam"}, {"optimizer": "rowwise-adagrad"}, {"model": "probit"}):
        settings = {"prior_variance": 1.0, "max_iter": 2, "random_state": 0, **settings}
        clf = AugmentReduceClassifier(**settings).fit(X, np.arange(500) % 50)
        fitted = clf._fitted
        parameters = fitted.parameters
        tensors = [parameters.weight, *parameters.weight_state, *fitted.local.values(), *fitted.sampler.values()]
        kept = sum(t.numel() * t.element_size() for t in tensors) + fitted.feature_counts.nbytes
        assert kept <= fitted.bytes_needed <= 3 * kept + 2e7


PEAK = """
import threading, time
import numpy as np, scipy.sparse as sp
from augment_reduce import AugmentReduceClassifier
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def fit(X, y, **settings):
    return AugmentReduceClassifier(n_jobs=1, random_state=0, **settings).fit(X, y)
rng = np.random.default_rng(0)
{small}
{rows}
before, peak, ended = resident(), [0], []
def watch():
    while not ended:
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
clf = fit(X, np.arange(len(y)) % 5, **{settings})
ended.append(1)
watcher.join()
print(peak[0] - before, clf._fitted.bytes_needed)
"""
LARGE = {
    "wide and sparse": "X = sp.random(500, 40_000, density=0.001, format='csr', dtype=np.float32)",
    "wide and dense": "X = rng.normal(size=(1000, 2000)).astype(np.float32)",
    "tall and sparse": "X = sp.random(7000, 1000, density=0.05, format='csr', dtype=np.float32)",
    "tall and dense": "X = rng.normal(size=(5000, 1000)).astype(np.float32)",
}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="asks Linux for resident memory")
@pytest.mark.parametrize("settings", [{}, {"max_iter": 5}], ids=["the optimum", "the search"])
@pytest.mark.parametrize("rows", LARGE)
def test_the_exact_optimum_is_counted(rows, settings):
    """In no part: a fit of 5 GB was said to need .02, and killed in a container."""
    small = (
        "for x in (rng.normal(size=(50, 5)),) * 2: fit(x, np.arange(50) % 5), fit(sp.csr_matrix(x), np.arange(50) % 5)"
    )
    code = PEAK.format(small=small, rows=f"{LARGE[rows]}; y = np.arange(X.shape[0]) % 5", settings=settings)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, said = map(int, done.stdout.split())
    assert peak <= 1.1 * said
    assert said <= 3 * peak + 1e8


def test_a_limit_of_address_space_is_asked_before_the_first_kernel():
    """The compiler ends the process where it finds no memory; rows were merged by a kernel before anything was
    asked."""
    code = """
import resource, numpy as np, scipy.sparse as sp
from augment_reduce import AugmentReduceClassifier
X = sp.random(1000, 5_000, density=0.01, format="csr", dtype=np.float32)
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + 2**21, used + 2**21))
try:
    AugmentReduceClassifier(n_jobs=2).fit(X, np.arange(1000) % 10)
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "GB are available" in done.stdout


def test_few_classes_and_very_many_features_are_counted():
    """Tables of the features are then as large as the weights."""
    with pytest.raises(MemoryError, match=r"tables of features"):
        validation._refuse_too_large({"tables of features": 32 * 10**12}, 0, 2, 10**12, np.float32)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of the address space are Unix's")
def test_an_address_space_too_small_for_torch_is_told_of_before_it_is_loaded():
    """OpenBLAS would try to allocate for ever."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (7 * 10**8, 7 * 10**8)); import augment_reduce"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert "MemoryError: augment-reduce needs an address space of about 1.15 GB" in ended.stderr
