"""What the fuzzers share: numbered cases, and mutations of bytes and of text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

INTERESTING_BYTES = b"\x00\x01\x7f\x80\xff\n\r\t ,;:#\"'+-.0159aeEnN_"
TOKENS = (
    b"", b"nan", b"inf", b"-inf", b"1e999", b"1e-999", b"-1", b"0", b"1", b"00", b"1_0", b"0x1", b"1.5.5", b"--1",
    b"2147483648", b"9223372036854775807", b"9223372036854775808", b"9" * 5000, b"1e308", b"1,5", b"True", b"False",
    b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3\xa9", b"\xef\xbc\x91", b"\xd9\xa1", b'"', b'""', b"'",
    b"\x00", b"\r", b"\x0b", b"\x1c", b"\xc2\x85", b"#", b":", b"::", b",", b",,", b"qid:1", b"1:1", b"0:1", b"-1:1",
    b"=1+1",
)  # fmt: skip


class Failure(NamedTuple):
    """A case that neither was refused as it should be nor gave something that is right."""

    case: int
    error: BaseException


def expect(fact: object, about: BaseException) -> None:
    """An error that was raised is as it should be."""
    if not fact:
        raise AssertionError(f"another error than expected: {about!r}") from about


class Fuzzer:
    """One format: writes the file of a case, reads it, and says whether what came of it is right.

    A wrong outcome is any exception from `check`: of the reader, or an AssertionError about what it returned.
    """

    name: str
    suffix = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prepare()

    def prepare(self) -> None:
        """Make the valid files that are mutated."""

    def path(self) -> Path:
        return self.folder / f"{self.name}{self.suffix}"

    def write(self, rng: random.Random) -> Path:
        """A mutated file."""
        raise NotImplementedError

    def check(self, path: Path) -> bool:
        """Whether the file was read; False if it was refused."""
        raise NotImplementedError


def run(fuzzer: Fuzzer, cases: range, seed: int) -> Iterator[Failure | bool]:
    """Of each case whether its file was read, or what went wrong."""
    for case in cases:
        try:
            yield fuzzer.check(fuzzer.write(random.Random(f"{fuzzer.name} {seed} {case}")))
        except Exception as error:
            yield Failure(case, error)


# ---- mutations ----


def mutated_bytes(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """A few bytes or stretches of them changed, anywhere."""
    found = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(found):
                found[at] = rng.choice(INTERESTING_BYTES)
            case 2:
                found[at:at] = bytes(rng.choices(INTERESTING_BYTES, k=rng.randint(1, 8)))
            case 3:
                del found[at : at + rng.randint(1, 16)]
            case 4:
                found[at:at] = found[at : at + rng.randint(1, 64)]
            case 5 if rng.random() < 0.3:
                del found[at:]
            case _:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)) % 2 ** (8 * size)
                found[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    return bytes(found)


def mutated_text(rng: random.Random, data: bytes, separators: bytes) -> bytes:
    """Lines moved, dropped or doubled; words between separators exchanged for odd ones; single bytes changed."""
    lines = data.split(b"\n")
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                lines[i] = mutated_bytes(rng, lines[i], 2)
            case 1 if len(lines) > 1:
                del lines[i]
            case 2:
                lines.insert(i, rng.choice((lines[rng.randrange(len(lines))], b"", b" ", b"#", *TOKENS)))
            case 3:
                lines[i] = lines[i][: rng.randrange(len(lines[i]) + 1)]
            case _:
                lines[i] = _with_another_word(rng, lines[i], separators)
    return b"\n".join(lines)


def _with_another_word(rng: random.Random, line: bytes, separators: bytes) -> bytes:
    edges = [-1, *(i for i, byte in enumerate(line) if byte in separators), len(line)]
    i = rng.randrange(len(edges) - 1)
    return line[: edges[i] + 1] + rng.choice(TOKENS) + line[edges[i + 1] :]
