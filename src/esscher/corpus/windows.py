"""Windows of token ids with the place of text, special tokens and padding in them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.corpus.documents import Piece, read_pieces
from esscher.corpus.spec import CorpusSpec
from esscher.inputs import as_count

CHUNK = 1 << 15  # characters tokenised as one string
CONTEXT = 256  # characters on either side of a cut that must tokenise as if there were none
CANDIDATES = 16
BATCH = 1 << 19  # characters tokenised in one call
BATCH_ITEMS = 4096
REPORTED = 1 << 14  # tokens from one call of progress to the next
SINGLE_SPACE = re.compile(r"(?<=\S)\s(?=\S)")
WORD_EDGE = re.compile(r"(?<=\S)\b(?=\S)")

Encode = Callable[[list[str]], list[list[int]]]
Report = Callable[[int, int | None], object]


@dataclass(frozen=True, eq=False)
class Windows:
    """W windows of T token ids; each position is text, special or padding, and only one of them.

    ``ids`` (W, T) int32; ``text``, ``special``, ``padding`` (W, T) bool; ``documents`` that gave
    tokens; ``text_sha256`` of the text as UTF-8, a zero byte before each document; ``sha256`` of
    ids, masks and that.
    """

    ids: npt.NDArray[np.int32]
    text: npt.NDArray[np.bool_]
    special: npt.NDArray[np.bool_]
    padding: npt.NDArray[np.bool_]
    documents: int
    text_sha256: str
    sha256: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """T, positions of a window."""
        return int(self.ids.shape[1])

    @property
    def tokens(self) -> int:
        """Positions that hold text."""
        return int(np.count_nonzero(self.text))


@dataclass(frozen=True)
class _Frame:
    """What stands around the text of a window, what fills it up, and which ids are not text."""

    before: list[int]
    after: list[int]
    padding: int
    is_text: npt.NDArray[np.bool_]  # by token id

    @classmethod
    def of(cls, tokenizer: Any, encode: Encode, wanted: bool) -> _Frame:
        named = {int(number) for number in tokenizer.all_special_ids}
        unknown = tokenizer.unk_token_id
        others = {
            getattr(tokenizer, f"{name}_token_id", None)
            for name in ("bos", "eos", "pad", "cls", "sep", "mask")
        }
        if unknown not in others:
            named.discard(unknown)  # a word the model does not know is text all the same
        padding = next(
            (
                number
                for number in (tokenizer.pad_token_id, tokenizer.eos_token_id)
                if number is not None
            ),
            0,
        )
        before, after = _around(tokenizer, encode) if wanted else ([], [])
        is_text = np.ones(max(len(tokenizer), *named, 0) + 1, dtype=bool)
        is_text[sorted(named)] = False
        return cls(before, after, int(padding), is_text)


@dataclass
class _Flat:
    """Token ids in one row while they are read; ``ends`` are the places where windows must end."""

    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    text: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    count: int = 0
    tokens: int = 0
    documents: int = 0
    opened: bool = False

    def open(self, separate: bool) -> None:
        """A new document begins; the one before counts if it gave tokens."""
        if separate and self.opened:
            self.ends.append(self.count)
        self.opened = False

    def add(
        self, ids: npt.NDArray[np.int32], is_text: npt.NDArray[np.bool_], most: int | None
    ) -> None:
        """Tokens in order, at most so many of text in all."""
        if most is not None and self.tokens + np.count_nonzero(is_text) > most:
            stop = int(np.searchsorted(np.cumsum(is_text), most - self.tokens)) + 1
            ids, is_text = ids[:stop], is_text[:stop]
        if len(ids) == 0:
            return
        self.ids.append(ids)
        self.text.append(is_text)
        self.count += len(ids)
        self.tokens += int(np.count_nonzero(is_text))
        self.documents += not self.opened
        self.opened = True


def make_windows(
    spec: CorpusSpec, tokenizer: Any, length: int, *, progress: Report | None = None
) -> Windows:
    """The corpus as windows of ``length`` token ids: every token of the text once, in order; the
    last one padded.

    Reading stops when ``spec.max_tokens`` tokens of text are there. ``progress(tokens, wanted or
    None)`` is called now and then. Special tokens that the text itself spells out stay where they
    are and count as special, not as text.
    """
    length = as_count(length, "length")
    if not callable(tokenizer) or not hasattr(tokenizer, "all_special_ids"):
        raise ValueError(
            f"tokenizer: expected one of transformers, got {type(tokenizer).__name__}; use"
            " AutoTokenizer"
        )

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            found = tokenizer(
                texts, add_special_tokens=False, truncation=False, padding=False, verbose=False
            )
        except Exception as cause:  # the tokenizers library raises nothing more precise
            raise ValueError(
                f"tokenizer: it refused the text ({' '.join(str(cause).split())[:120]}); give other"
                " text"
            ) from cause
        ids: list[list[int]] = found["input_ids"]
        return ids

    frame = _Frame.of(tokenizer, encode, spec.special)
    room = length - len(frame.before) - len(frame.after)
    if room < 1:
        raise ValueError(
            f"length: expected more than the {length - room} special tokens of a window, got"
            f" {length}; take longer windows, or special=False"
        )
    flat, text_hash, due = _Flat(), hashlib.sha256(), REPORTED
    for starts, text, gap, ids in _tokenised(spec, encode, flat):
        if starts:
            flat.open(spec.documents == "separate")
        text_hash.update((b"\0" if starts else gap.encode("utf-8")) + text.encode("utf-8"))
        row = np.array(ids, dtype=np.int32)
        flat.add(row, frame.is_text[row], spec.max_tokens)
        if flat.tokens == spec.max_tokens:
            break
        if progress is not None and flat.tokens >= due:
            progress(flat.tokens, spec.max_tokens)
            due = flat.tokens + REPORTED
    if flat.tokens == 0:
        raise ValueError(
            "corpus: expected text, got none that this tokenizer has tokens for; give other text"
        )
    if progress is not None:
        progress(flat.tokens, spec.max_tokens)
    return _laid_out(flat, frame, length, text_hash.hexdigest())


def _laid_out(flat: _Flat, frame: _Frame, length: int, text_sha256: str) -> Windows:
    """Rows of before, text, after, padding."""
    left, right = len(frame.before), len(frame.after)
    room = length - left - right
    ends = np.array([*flat.ends, flat.count] if flat.opened else flat.ends, dtype=np.int64)
    lengths = np.diff(ends, prepend=0)
    shape = (int((-(-lengths // room)).sum()), length)
    ids = np.full(shape, frame.padding, dtype=np.int32)
    text, special = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    all_ids, all_text = np.concatenate(flat.ids), np.concatenate(flat.text)
    flat.ids.clear()
    flat.text.clear()
    ids[:, :left], special[:, :left] = frame.before, True
    row = 0
    for end, size in zip(ends.tolist(), lengths.tolist(), strict=True):
        whole, rest = divmod(size, room)
        for rows, width, first in ((whole, room, end - size), (int(rest > 0), rest, end - rest)):
            here, body = slice(row, row + rows), slice(left, left + width)
            part = slice(first, first + rows * width)
            ids[here, body] = all_ids[part].reshape(rows, width)
            text[here, body] = all_text[part].reshape(rows, width)
            special[here, body] = ~text[here, body]
            ids[here, left + width : left + width + right] = frame.after
            special[here, left + width : left + width + right] = True
            row += rows
    padding = ~(text | special)
    whole_hash = hashlib.sha256(f"{shape} {text_sha256}".encode())
    for part_of_all in (ids.astype("<i4", copy=False), text, special, padding):
        whole_hash.update(np.ascontiguousarray(part_of_all).data)
    return Windows(ids, text, special, padding, flat.documents, text_sha256, whole_hash.hexdigest())


def _around(tokenizer: Any, encode: Encode) -> tuple[list[int], list[int]]:
    """Ids the model expects before and after a text, read off a short one."""
    for sample in ("a", "the", "0", *list(tokenizer.get_vocab())[:64]):
        try:
            (bare,) = encode([sample])
        except ValueError:
            continue  # a vocabulary of whole words may know no other
        full: list[int] = tokenizer(sample, truncation=False, padding=False, verbose=False)[
            "input_ids"
        ]
        places = [
            place
            for place in range(len(full) - len(bare) + 1)
            if full[place : place + len(bare)] == bare
        ]
        if bare and len(places) == 1:
            return full[: places[0]], full[places[0] + len(bare) :]
    raise ValueError(
        "tokenizer: its special tokens around a text could not be found; use special=False"
    )


def _tokenised(
    spec: CorpusSpec, encode: Encode, flat: _Flat
) -> Iterator[tuple[bool, str, str, list[int]]]:
    """Chunks with their ids, a batch at a time; batches are small when few tokens are left to
    find.
    """
    batch: list[tuple[bool, str, str]] = []
    size = 0
    for chunk in _chunks(read_pieces(spec), encode):
        batch.append(chunk)
        size += len(chunk[1])
        enough = (
            BATCH if spec.max_tokens is None else min(BATCH, 8 * (spec.max_tokens - flat.tokens))
        )
        if size >= enough or len(batch) == BATCH_ITEMS:
            yield from _with_ids(batch, encode)
            batch, size = [], 0
    yield from _with_ids(batch, encode)


def _with_ids(
    batch: list[tuple[bool, str, str]], encode: Encode
) -> Iterator[tuple[bool, str, str, list[int]]]:
    if batch:
        for (starts, text, gap), ids in zip(
            batch, encode([text for _, text, _ in batch]), strict=True
        ):
            yield starts, text, gap, ids


def _chunks(pieces: Iterable[Piece], encode: Encode) -> Iterator[tuple[bool, str, str]]:
    """(starts a document, text, character left out before it): long documents in chunks that keep
    their token ids.
    """
    rest, starts, gap = "", True, ""
    for new, text in pieces:
        if new:
            if rest:
                yield starts, rest, gap
            rest, starts, gap = "", True, ""
        rest += text
        place, size = 0, CHUNK
        while len(rest) - place > size + CONTEXT:
            cut = _find_cut(rest, place, place + size, encode)
            if cut is None:
                size *= 2
                continue
            end, skipped = cut
            yield starts, rest[place:end], gap
            starts, gap = False, rest[end : end + skipped]
            place, size = end + skipped, CHUNK
        rest = rest[place:]
    if rest:
        yield starts, rest, gap


def _find_cut(text: str, start: int, end: int, encode: Encode) -> tuple[int, int] | None:
    """Where the text can be cut before ``end`` without changing a token id: the place, and how many
    characters to skip.

    What a tokenizer does at the start of a string differs (a space is added, kept or dropped), so
    each place is tried: the ids of both sides, with the space or without it, must be those of the
    uncut text around it.
    """
    for pattern, skips in ((SINGLE_SPACE, (0, 1)), (WORD_EDGE, (0,))):
        places = [
            match.start() for match in pattern.finditer(text, max(start + 1, end - CHUNK // 4), end)
        ]
        for place in reversed(places[-CANDIDATES:]):
            left, right = text[max(start, place - CONTEXT) : place], text[place : place + CONTEXT]
            whole, first, *others = encode([left + right, left, *(right[skip:] for skip in skips)])
            for skip, other in zip(skips, others, strict=True):
                if first and other and first + other == whole:
                    return place, skip
    return None
