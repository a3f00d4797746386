"""Downloads: whole, checked and converted, or not there at all. Served by a server of our own on this machine."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from augment_reduce.data import DataFileError, DatasetNotFoundError, arff, cache_folder, download, load_dataset
from augment_reduce.data.registry import HOMES, DataFile

ARFF = b"""@relation tiny

@attribute zero {0,1}
@attribute one {0,1}
@attribute TAG_a {0,1}
@attribute TAG_b {0,1}

@data
{0 1,2 1}
{3 1,1 1,2 1}
"""
PAGES = {
    "/file.txt": b"hello\n" * 50_000,
    "/train.arff": ARFF,
    "/altered.arff": ARFF.replace(b"{0 1,2 1}", b"{1 1,2 1}"),
}


class Handler(BaseHTTPRequestHandler):
    """Serves PAGES; below /cut/ it promises a whole page and hangs up in the middle."""

    def do_GET(self) -> None:
        body = PAGES.get(self.path.removeprefix("/cut"))
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path.startswith("/cut") else body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("AUGMENT_REDUCE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_download_arrives_whole_under_its_name(tmp_path, server, capsys):
    target = tmp_path / "deep" / "file.txt"
    download.fetch(f"{server}/file.txt", target, DataFile((), sha256(PAGES["/file.txt"])))
    assert target.read_bytes() == PAGES["/file.txt"]
    assert everything_in(tmp_path) == ["file.txt"]
    assert "file.txt" in capsys.readouterr().err  # the progress bar


def test_quiet_when_asked(tmp_path, server, capsys):
    download.fetch(f"{server}/file.txt", tmp_path / "file.txt", DataFile(()), progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("page", ["/cut/file.txt", "/absent.txt"])
def test_a_broken_download_leaves_nothing(tmp_path, server, page):
    with pytest.raises((OSError, download.http.client.HTTPException)):
        download.fetch(server + page, tmp_path / "file.txt", DataFile(()), progress=False)
    assert everything_in(tmp_path) == []


def test_a_wrong_checksum_leaves_nothing(tmp_path, server):
    with pytest.raises(DataFileError, match="the sha256 0000"):
        download.fetch(f"{server}/file.txt", tmp_path / "file.txt", DataFile((), "0000"), progress=False)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_full_or_closed_disk_says_what_to_do(tmp_path, server, monkeypatch, code):
    def no_room(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(download.os, "replace", no_room)
    with pytest.raises(OSError, match=r"file\.txt could not be written.*XDG_CACHE_HOME") as caught:
        download.fetch(f"{server}/file.txt", tmp_path / "file.txt", DataFile(()), progress=False)
    assert caught.value.errno == code
    assert everything_in(tmp_path) == []


def test_interrupted_by_the_user_leaves_nothing(tmp_path, server, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "check_sum", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download.fetch(f"{server}/file.txt", tmp_path / "file.txt", DataFile(()), progress=False)
    assert everything_in(tmp_path) == []


def tiny_bibtex(server: str, page: str = "train.arff") -> dict[str, DataFile]:
    """Bibtex's four files as they are served, but small."""
    files = HOMES["bibtex"].files
    convert = {role: file.convert for role, file in files.items()}
    urls = (f"{server}/nowhere/{page}", f"{server}/cut/{page}", f"{server}/{page}")
    return {
        role: replace(
            file,
            urls=urls,
            sha256=None,
            content_sha256=sha256(convert[role](ARFF)),  # type: ignore[misc]
            served_sha256=sha256(ARFF),
        )
        for role, file in files.items()
    }


def test_bibtex_is_downloaded_converted_and_kept(server, monkeypatch):
    """The first address does not have the file, the second hangs up, the third serves it."""
    monkeypatch.setitem(HOMES, "bibtex", replace(HOMES["bibtex"], files=tiny_bibtex(server)))
    dataset = load_dataset("bibtex", progress=False)
    assert dataset.train.X.toarray().tolist() == [[1, 0], [0, 1]]
    assert dataset.class_names == ["TAG_a"]
    assert dataset.feature_names == ["zero", "one"]
    names = ["bibtex_test.txt.gz", "bibtex_train.txt.gz", "feature_names.txt", "label_names.txt"]
    assert everything_in(cache_folder()) == names
    monkeypatch.setattr(download, "fetch", lambda *args, **options: pytest.fail("downloaded twice"))
    assert len(load_dataset("bibtex").train) == 2


def test_no_address_works(server, monkeypatch):
    monkeypatch.setitem(HOMES, "bibtex", replace(HOMES["bibtex"], files=tiny_bibtex(server, "altered.arff")))
    with pytest.raises(DatasetNotFoundError) as caught:
        load_dataset("bibtex", progress=False)
    message = str(caught.value)
    for part in ("404", "IncompleteRead", "the sha256", "bibtex_train.txt.gz", "tsoumakas/mulan", str(cache_folder())):
        assert part in message
    assert everything_in(cache_folder()) == []


def test_arff_becomes_repository_text():
    assert arff.to_repository_text(ARFF) == b"2 2 2\n0 0:1\n0,1 1:1\n"
    assert arff.label_names(ARFF) == b"TAG_a\nTAG_b\n"
    assert arff.feature_names(ARFF) == b"zero\none\n"


def test_checksum_of_the_file_or_of_its_contents(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"data", mtime=0))
    download.check_sum(path, DataFile((), sha256(path.read_bytes())))
    download.check_sum(path, DataFile((), "0000", sha256(b"data")))
    download.check_sum(path, DataFile(()))
    with pytest.raises(DataFileError, match="cut short or altered"):
        download.check_sum(path, DataFile((), sha256(b"data")))
    path.write_bytes(b"data")
    download.check_sum(path, DataFile((), "0000", sha256(b"data")))
