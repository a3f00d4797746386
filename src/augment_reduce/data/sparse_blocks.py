"""Parse a block of `labels index:value index:value …` lines by array operations on all of its bytes.

`fast_block` returns None for anything unusual, and `careful_block` then parses the lines one by one: it defines what is
valid, and raises all errors.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from augment_reduce.data.files import PathLike
from augment_reduce.data.sparse_lines import (
    LARGEST_VALUE,
    NUMBER,
    Block,
    IntArray,
    Rules,
    ascending_rows,
    careful_block,
    highest_index,
)

SAFE_DIGITS = 18  # 10**18 < 2**63: the digits of a token of this length never overflow
EXACT_MANTISSA = 2**53  # below it, mantissa / 10**k (k <= 22) is the correctly rounded double

TOKEN, SPACE, NEWLINE, COMMA, COLON, ODD = range(6)
KIND = np.full(256, TOKEN, np.uint8)
KIND[:32] = ODD
KIND[[ord(" "), ord("\t"), ord("\r")]] = SPACE
KIND[ord("\n")], KIND[ord(",")], KIND[ord(":")] = NEWLINE, COMMA, COLON
POWERS_OF_TEN = 10.0 ** np.arange(SAFE_DIGITS + 1)


def parse_block(path: PathLike, first: int, block: bytes, rules: Rules) -> Block:
    """The rows of `block`, whose first line is line `first` of `path`; features ascending in every row."""
    if rules.comments and b"#" in block:
        block = re.sub(rb"#[^\n]*", b"", block)
    return fast_block(block, rules) or careful_block(path, first, block, rules)


def fast_block(block: bytes, rules: Rules) -> Block | None:
    """The rows of a block of whole lines, or None if `careful_block` should parse it."""
    buf = np.frombuffer(block, np.uint8)
    kind = KIND[buf]
    if (kind == ODD).any() or not _is_utf8(block):
        return None
    in_token = np.concatenate([[False], kind == TOKEN])
    # The block ends with a newline, so starts and ends of tokens pair up.
    edges = np.flatnonzero(in_token[1:] != in_token[:-1])
    starts, ends = edges[0::2], edges[1::2]
    before, after = kind[starts - 1], kind[ends]  # for a token at byte 0, kind[-1] is the final newline: a line start
    is_index, is_value = after == COLON, before == COLON
    is_label = ~(is_index | is_value)
    well_formed = (
        # Every ':' and ',' has a token on both sides, a value ends at a blank, and labels open the line.
        _count(kind, COLON) == _count(after, COLON) == _count(before, COLON)
        and _count(kind, COMMA) == _count(after, COMMA) == _count(before, COMMA)
        and not (is_index & ((before == COLON) | (before == COMMA))).any()
        and not (is_value & (after == COMMA)).any()
        and not (is_label & (before == SPACE)).any()
    )
    if not well_formed:
        return None
    newlines = np.flatnonzero(kind == NEWLINE)
    counts = np.diff(np.searchsorted(starts[is_index], newlines), prepend=0)
    label_counts = np.diff(np.searchsorted(starts[is_label], newlines), prepend=0)
    indices = integer_tokens(buf, starts[is_index], ends[is_index])
    values = decimal_tokens(buf, starts[is_value], ends[is_value])
    if indices is None or values is None:
        return None
    if indices.size and (indices.min() < rules.lowest or indices.max() > highest_index(rules)):
        return None
    ordered = ascending_rows(indices, values, counts)
    if ordered is None:
        return None
    label_starts, label_ends = starts[is_label], ends[is_label]
    if rules.n_labels is None:
        spans = zip(label_starts.tolist(), label_ends.tolist(), strict=True)
        texts = [block[start:end] for start, end in spans]
        return Block(texts, np.zeros(0, np.int64), label_counts, *ordered, counts)
    ids = integer_tokens(buf, label_starts, label_ends)
    if ids is None or ids.max(initial=-1) >= rules.n_labels:
        return None
    return Block([], ids, label_counts, *ordered, counts)


def _count(kinds: npt.NDArray[np.uint8], kind: int) -> int:
    return int(np.count_nonzero(kinds == kind))


def _is_utf8(block: bytes) -> bool:
    if block.isascii():
        return True
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def integer_tokens(buf: npt.NDArray[np.uint8], starts: IntArray, ends: IntArray) -> IntArray | None:
    """The tokens as integers, all digits of one place at a time; None if one has another character or is very long."""
    lengths = ends - starts
    longest = int(lengths.max(initial=0))
    if longest > SAFE_DIGITS:
        return None
    total = np.zeros(len(starts), np.int64)
    for place in range(longest):
        active = lengths > place
        digit = buf[starts + np.minimum(place, lengths - 1)] - np.uint8(ord("0"))
        if (digit > 9).any():  # below '0' wraps to a large uint8
            return None
        total = np.where(active, 10 * total + digit, total)
    return total


def decimal_tokens(buf: npt.NDArray[np.uint8], starts: IntArray, ends: IntArray) -> npt.NDArray[np.float32] | None:
    """The tokens as float32: plain decimals (-12.5) by arrays, others (1e-5) one by one; None if one is no number."""
    lengths = ends - starts
    longest = min(int(lengths.max(initial=0)), SAFE_DIGITS)
    mantissa, decimals = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    n_digits, n_points = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    negative = np.zeros(len(starts), bool)
    for place in range(longest):
        active = lengths > place
        character = buf[starts + np.minimum(place, lengths - 1)]
        digit = character - np.uint8(ord("0"))
        is_digit = active & (digit <= 9)
        mantissa = np.where(is_digit, 10 * mantissa + digit, mantissa)
        decimals += is_digit & (n_points > 0)
        n_digits += is_digit
        n_points += active & (character == ord("."))
        if place == 0:
            negative = character == ord("-")
    plain = (n_digits + n_points + negative == lengths) & (n_points <= 1) & (n_digits > 0) & (mantissa < EXACT_MANTISSA)
    doubles = np.where(negative, -1.0, 1.0) * mantissa / POWERS_OF_TEN[decimals]
    for i in np.flatnonzero(~plain).tolist():
        token = buf[starts[i] : ends[i]].tobytes()
        if NUMBER.fullmatch(token) is None:
            return None
        doubles[i] = float(token)
    if np.abs(doubles).max(initial=0.0) > LARGEST_VALUE:
        return None
    return doubles.astype(np.float32)
