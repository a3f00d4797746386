"""A file is written whole or not at all, and what was there before is treated as the docs say."""

import contextlib
import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from augment_reduce.support import atomic
from augment_reduce.support.atomic import check_writable, replaced_atomically, target_of

ROOT = Path(atomic.__file__).parents[1]


def write(path, content=b"new"):
    with replaced_atomically(path) as temporary:
        temporary.write_bytes(content)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


# ---- what was there before ----


def test_a_new_file_has_the_permissions_that_the_umask_leaves(umask, tmp_path):
    write(tmp_path / "m")
    assert mode_of(tmp_path / "m") == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_the_permissions_of_a_file_survive(mode, umask, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"old")
    path.chmod(mode)
    write(path)
    assert path.read_bytes() == b"new"
    assert mode_of(path) == mode


def test_a_file_that_is_private_is_private_while_it_is_written(umask, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with replaced_atomically(path) as temporary:
        assert mode_of(temporary) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_of_a_file_stays(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"old")
    os.chown(path, 12345, 23456)
    write(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)


def test_a_group_that_cannot_be_kept_loses_its_permissions(tmp_path, monkeypatch):
    path = tmp_path / "m"
    path.write_bytes(b"old")
    path.chmod(0o660)
    before = os.stat(path)
    of_others = os.stat_result((before.st_mode, *before[1:5], before.st_gid + 1, *before[6:]))

    def forbidden(*_):
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, "chown", forbidden)
    atomic._keep_permissions(path, of_others)
    assert mode_of(path) == 0o600


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("data/real")
    (tmp_path / "link to link").symlink_to(tmp_path / "link")
    write(tmp_path / "link to link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link to link").is_symlink()
    assert (tmp_path / "data" / "real").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path / "data")) == ["real"]


def test_a_dangling_link_is_followed_to_where_its_target_will_be(tmp_path):
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    (tmp_path / "to nowhere").symlink_to("no folder/real")
    with pytest.raises(FileNotFoundError, match="no folder"):
        write(tmp_path / "to nowhere")


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=r"symbolic links.*/a"):
        write(tmp_path / "a")


def test_a_hard_link_is_cut(tmp_path):
    (tmp_path / "m").write_bytes(b"old")
    os.link(tmp_path / "m", tmp_path / "other name")
    write(tmp_path / "m")
    assert (tmp_path / "other name").read_bytes() == b"old"


def test_what_is_no_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="FIFO"):
        write(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(ValueError, match="device"):
        target_of("/dev/null")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        write(tmp_path)
    for empty in ("", Path()):
        with pytest.raises((ValueError, IsADirectoryError)):
            write(empty)
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write m"):
        write(tmp_path / "nowhere" / "m")
    assert os.listdir(tmp_path) == ["pipe"]


# ---- names ----


@pytest.mark.parametrize("name", ["m" * 241, "m" * 255, "ä" * 127, ".hidden", "with space\n"])
def test_every_legal_name_works(name, tmp_path):
    check_writable(tmp_path / name)
    write(tmp_path / name)
    write(tmp_path / name, b"again")
    assert (tmp_path / name).read_bytes() == b"again"
    assert os.listdir(tmp_path) == [name]


def test_a_name_that_is_too_long_is_refused_before_any_work(tmp_path):
    for check in (check_writable, write, target_of):
        with pytest.raises(OSError, match="too long") as caught:
            check(tmp_path / ("m" * 256))
        assert caught.value.errno == errno.ENAMETOOLONG
        assert caught.value.filename == str(tmp_path / ("m" * 256))
    assert os.listdir(tmp_path) == []


# ---- where it cannot be written ----


@contextlib.contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_is_an_oserror_that_names_the_file_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "m"
    write(path, b"old")
    with files_of_at_most(100_000), pytest.raises(OSError, match="File too large") as caught:
        write(path, bytes(200_000))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_system_call_that_fails_names_the_file(call, tmp_path, monkeypatch):
    path = tmp_path / "m"
    write(path, b"old")

    def failing(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match=r"Input/output error.*/m") as caught:
        write(path)
    assert caught.value.filename == str(path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m"]


def test_an_error_about_another_file_is_left_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replaced_atomically(tmp_path / "m"):
        os.stat(tmp_path / "another")
    assert str(caught.value.filename) == str(tmp_path / "another")
    assert os.listdir(tmp_path) == []


def test_a_body_may_put_a_file_of_its_own_in_the_place_of_the_temporary_one(tmp_path):
    (tmp_path / "made elsewhere").write_bytes(b"new")
    with replaced_atomically(tmp_path / "m") as temporary:
        os.replace(tmp_path / "made elsewhere", temporary)
    assert (tmp_path / "m").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["m"]


def test_room_and_rights_are_asked_for_before_any_work(tmp_path, monkeypatch):
    check_writable(tmp_path / "m", 1000)
    with pytest.raises(OSError, match=r"No space left.*about 1,000,000,000,000.0 MB needed") as caught:
        check_writable(tmp_path / "m", 10**18)
    assert caught.value.errno == errno.ENOSPC
    (tmp_path / "m").touch()
    tmp_path.chmod(0o1777)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="another user's file"):
        check_writable(tmp_path / "m")
    check_writable(tmp_path / "new")


def test_the_folder_is_synced_too(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "m")
    assert synced == [False, True]  # first the bytes, then the name


# ---- interrupts and kills ----


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that is run in `atomic` or `contextlib`."""

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(("atomic.py", "contextlib.py")):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_the_old_file_or_the_new_and_nothing_else(tmp_path):
    path, interrupted = tmp_path / "m", 0
    for n in range(1, 1000):
        path.write_bytes(b"old")
        before = sys.gettrace()
        sys.settrace(InterruptAt(n))
        try:
            write(path)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        finally:
            sys.settrace(before)
        assert path.read_bytes() in (b"old", b"new")
        assert os.listdir(tmp_path) == ["m"], n
    assert 30 < interrupted < 900  # every line was met


WRITER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from augment_reduce.support.atomic import replaced_atomically
for i in range(10**9):
    with replaced_atomically(sys.argv[1]) as temporary:
        temporary.write_bytes(bytes([i % 256]) * 2_000_000)
        if i == int(sys.argv[2]):
            print(flush=True)
            time.sleep(float(sys.argv[3]))
"""


def killed_writer(path, turn, sleep, after):
    """A process that writes again and again, killed some seconds after it began its turn."""
    command = [sys.executable, "-c", WRITER, path, str(turn), str(sleep)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after)
        process.send_signal(signal.SIGKILL)


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new(tmp_path):
    path, rng = tmp_path / "m", random.Random(0)
    for _ in range(4):
        killed_writer(path, 2, 0.0, 0.05 * rng.random())
        content = path.read_bytes()
        assert len(content) == 2_000_000
        assert len(set(content)) == 1
    write(path)
    assert os.listdir(tmp_path) == ["m"]


def test_what_a_killed_writer_left_goes_with_the_next_write_to_its_folder(tmp_path):
    killed_writer(tmp_path / "m", 0, 1000.0, 0.0)
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".part")
    write(tmp_path / "another")
    assert os.listdir(tmp_path) == ["another"]


def test_a_file_that_is_being_written_is_not_taken_for_litter(tmp_path):
    with replaced_atomically(tmp_path / "slow") as temporary:
        temporary.write_bytes(b"slow")
        write(tmp_path / "quick")
        write(tmp_path / "slow", b"quicker")
        assert temporary.exists()
    assert (tmp_path / "slow").read_bytes() == b"slow"
    assert sorted(os.listdir(tmp_path)) == ["quick", "slow"]


def test_a_file_that_was_taken_for_litter_while_it_was_made_is_made_again(tmp_path, monkeypatch):
    real, taken = atomic.fcntl.flock, []

    def flock(handle, how):
        if not taken:
            (found,) = tmp_path.glob(".augment-reduce-*.part")
            found.unlink()  # another process, between the making and the locking
            taken.append(found)
        real(handle, how)

    monkeypatch.setattr(atomic.fcntl, "flock", flock)
    write(tmp_path / "m")
    assert taken
    assert (tmp_path / "m").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["m"]


def test_only_what_is_ours_and_abandoned_is_removed(tmp_path):
    """Files of development versions, which were not locked, after an hour; the safetensors package's after a day."""
    day_old = time.time() - 100_000
    ours, theirs = b'\x99\0\0\0\0\0\0\0{"__metadata__":{"format":"augment-reduce model"', b"a temporary file of others"
    found = {
        ".augment-reduce-0123abcd.part": (b"", None, False), ".m.abcdefgh.part": (b"x", day_old, False),
        ".tmpAb12Cd": (ours, day_old, False), ".tmpAb12Ce": (theirs, day_old, True), ".tmpAb12Cf": (ours, None, True),
        ".m.abcdefgi.part": (b"x", None, True), ".other.abcdefgh.part": (b"x", day_old, True),
        ".augment-reduce-notours.part": (b"", day_old, True), "augment-reduce-0123abcd.part": (b"", day_old, True),
    }  # fmt: skip
    for name, (content, age, _) in found.items():
        (tmp_path / name).write_bytes(content)
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    os.mkfifo(tmp_path / ".augment-reduce-00000000.part")
    write(tmp_path / "m")
    stays = {name for name, (_, _, stays) in found.items() if stays}
    assert set(os.listdir(tmp_path)) == {"m", ".augment-reduce-00000000.part", *stays}
