"""Find the files of a named dataset, verify their checksums, and download missing ones."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import io
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from augment_reduce.data.files import DataFileError, PathLike, is_gzip, open_data
from augment_reduce.data.registry import HOMES, DataFile

ENVIRONMENT_VARIABLE = "AUGMENT_REDUCE_DATA"
CHUNK = 1 << 16
TIMEOUT_SECONDS = 30.0


class DatasetNotFoundError(FileNotFoundError):
    """A file of a dataset was not found: which one, where it was searched, where to get it and where to put it."""


def cache_folder() -> Path:
    """The user's cache: $XDG_CACHE_HOME/augment-reduce if that is set, else the platform's usual place."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "augment-reduce"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "augment-reduce" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "augment-reduce"
    return Path.home() / ".cache" / "augment-reduce"


def search_roots(path: PathLike | None = None) -> list[Path]:
    """The folders searched for datasets, in order: the path given, $AUGMENT_REDUCE_DATA, the cache, the package."""
    roots: list[Path] = []
    if path is not None:
        if not Path(path).is_dir():
            raise DatasetNotFoundError(
                f"Expected a folder with datasets at path={str(path)!r}, but found no folder there. Name the folder "
                "that holds mnist/, bibtex/ and so on, or one of these."
            )
        roots.append(Path(path))
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        roots.append(Path(chosen))
    return [*roots, cache_folder(), Path(__file__).resolve().parent]


def find_file(dataset: str, role: str, path: PathLike | None = None) -> Path | None:
    """The first file of that role on the search path, in the dataset's folder or directly in `path`, or None."""
    home = HOMES[dataset]
    for i, root in enumerate(search_roots(path)):
        # Directly in the root only for the path that the user gave: a stray train.txt elsewhere may be anything.
        for folder in (*home.folders, ".") if path is not None and i == 0 else home.folders:
            for name in home.files[role].names:
                candidate = root / folder / name
                if candidate.is_file():
                    return candidate
    return None


def locate(
    dataset: str, role: str, *, path: PathLike | None, download: bool, verify: bool, progress: bool = True
) -> Path:
    """The file of that role, found or downloaded, and checked against its checksum."""
    file = HOMES[dataset].files[role]
    found = find_file(dataset, role, path)
    if found is not None:
        if verify:
            check_sum(found, file)
        return found
    if not download or not file.urls:
        raise not_found(dataset, role, path, "")
    target = cache_folder() / HOMES[dataset].folders[0] / file.names[0]
    failures = []
    for url in file.urls:
        try:
            fetch(url, target, file, progress=progress)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            ConnectionError,
            TimeoutError,
            DataFileError,
        ) as error:
            failures.append(f"{url}: {error}")
        else:
            return target
    raise not_found(dataset, role, path, "; ".join(failures))


def not_found(dataset: str, role: str, path: PathLike | None, failures: str) -> DatasetNotFoundError:
    home = HOMES[dataset]
    name = home.files[role].names[0]
    places = ", ".join(str(root) for root in search_roots(path))
    parts = [
        f"Expected the file {name} of the dataset {dataset!r}, but did not find it: looked in the folder "
        f"{home.folders[0]}/ below each of {places}.",
        f"Downloading failed: {failures}." if failures else "",
        f"Get it from {home.page}.",
        home.advice,
        f"Then put it at {cache_folder() / home.folders[0] / name}, or in {home.folders[0]}/ below a folder that you "
        f"name with path= or the environment variable {ENVIRONMENT_VARIABLE}.",
    ]
    return DatasetNotFoundError(" ".join(part for part in parts if part))


def check_sum(path: Path, file: DataFile) -> None:
    """Refuse a file whose checksum, compressed or uncompressed, is not the recorded one."""
    if file.sha256 is None and file.content_sha256 is None:
        return
    with open(path, "rb") as raw:
        sum_of_file = _sha256(raw)
    if sum_of_file in (file.sha256, file.content_sha256):
        return
    if file.content_sha256 is not None and is_gzip(path):
        with open_data(path) as stream:
            if _sha256(stream) == file.content_sha256:
                return
    raise DataFileError(
        path,
        expected=f"the sha256 {file.sha256 or file.content_sha256}",
        found=sum_of_file,
        advice="The file was cut short or altered: delete it, so that it can be fetched again, or pass verify=False if "
        "you changed it on purpose.",
    )


def _sha256(stream: BinaryIO) -> str:
    total = hashlib.sha256()
    while piece := stream.read(1 << 20):
        total.update(piece)
    return total.hexdigest()


def fetch(url: str, target: Path, file: DataFile, *, progress: bool = True) -> None:
    """Download `url` to `target`, verified and converted, under a temporary name until complete."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(target) as part:
            _receive(url, part, progress=progress)
            if file.convert is not None:
                check_sum(part, DataFile((), file.served_sha256))
                contents = file.convert(part.read_bytes(), url)
                part.write_bytes(_gzip(contents) if target.suffix == ".gz" else contents)
            check_sum(part, file)
            part.chmod(0o644)
            os.replace(part, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        advice = "Make room or give access there, or set XDG_CACHE_HOME to another folder; nothing half was left."
        raise OSError(error.errno, f"{target} could not be written ({error.strerror}). {advice}") from error


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A temporary file beside the target, always removed at the end."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-", suffix=".part")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _receive(url: str, part: Path, *, progress: bool) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "augment-reduce"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply, open(part, "wb") as out:
        length = reply.headers.get("Content-Length")
        total = int(length) if length is not None and length.isdigit() else None
        with _bar(enabled=progress) as bar:
            task = bar.add_task(url.rpartition("/")[2], total=total)
            received = 0
            while piece := reply.read(CHUNK):
                out.write(piece)
                received += len(piece)
                bar.update(task, completed=received)
    if total is not None and received != total:
        raise http.client.IncompleteRead(b"", total - received)


def _bar(*, enabled: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not enabled)


def _gzip(contents: bytes) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream:
        stream.write(contents)
    return packed.getvalue()
