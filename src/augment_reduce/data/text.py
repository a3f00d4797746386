"""Running text as token numbers, for next-word prediction over a large vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from augment_reduce.data.files import PathLike, decode_line, empty_file, line_blocks

UNKNOWN_TOKEN = "<unk>"


@dataclass(frozen=True)
class TokenLines:
    """Lines of tokens, one after another: line i is `ids[offsets[i] : offsets[i + 1]]`."""

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    @property
    def n_lines(self) -> int:
        return len(self.offsets) - 1

    def line(self, i: int) -> npt.NDArray[np.int32]:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TextDataset:
    """Text split into training, validation and test lines.

    `vocabulary[0]` is the unknown token; then come the training words, most frequent first, ties in alphabetical
    order.
    """

    name: str
    train: TokenLines
    validation: TokenLines
    test: TokenLines
    vocabulary: list[str]
    min_count: int

    @property
    def n_classes(self) -> int:
        return len(self.vocabulary)

    def words(self, ids: npt.ArrayLike) -> list[str]:
        return [self.vocabulary[i] for i in np.asarray(ids).tolist()]


def load_text(name: str, files: Mapping[str, PathLike], *, min_count: int = 1) -> TextDataset:
    """Read the parts "train", "validation", "test"; words seen fewer than `min_count` times in training are unknown."""
    counts: Counter[str] = Counter()
    for tokens in _lines(files["train"]):
        counts.update(tokens)
    if not counts:
        raise empty_file(files["train"], "lines of text")
    counts.pop(UNKNOWN_TOKEN, None)
    words = sorted(
        (word for word, count in counts.items() if count >= min_count), key=lambda word: (-counts[word], word)
    )
    vocabulary = [UNKNOWN_TOKEN, *words]
    number = {word: i for i, word in enumerate(vocabulary)}
    parts = {part: _numbered(path, number) for part, path in files.items()}
    return TextDataset(name, parts["train"], parts["validation"], parts["test"], vocabulary, min_count)


def _numbered(path: PathLike, number: Mapping[str, int]) -> TokenLines:
    ids: list[npt.NDArray[np.int32]] = []
    lengths = [0]
    for tokens in _lines(path):
        ids.append(np.fromiter((number.get(token, 0) for token in tokens), np.int32, len(tokens)))
        lengths.append(len(tokens))
    return TokenLines(np.concatenate(ids) if ids else np.zeros(0, np.int32), np.cumsum(lengths, dtype=np.int64))


def _lines(path: PathLike) -> Iterator[list[str]]:
    for first, block in line_blocks(path):
        for line_number, line in enumerate(block.split(b"\n")[:-1], start=first):
            yield decode_line(path, line_number, line).split()
