"""Windows of token ids, with masks of the positions of text, special tokens and padding."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.corpus.documents import read_documents
from esscher.corpus.spec import CorpusSpec
from esscher.inputs import as_count

BATCH = 1 << 19  # characters tokenised in one call, and no less than a document

Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True, eq=False)
class Windows:
    """W windows of T token ids; each position is either text, special or padding.

    ``ids`` (W, T) int32; ``text``, ``special``, ``padding`` (W, T) bool; ``documents`` that gave
    tokens; ``sha256`` of ids, masks and text.
    """

    ids: npt.NDArray[np.int32]
    text: npt.NDArray[np.bool_]
    special: npt.NDArray[np.bool_]
    padding: npt.NDArray[np.bool_]
    documents: int
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


def make_windows(spec: CorpusSpec, tokenizer: Any, length: int) -> Windows:
    """The corpus as windows of ``length`` token ids: every token of the text once, in order; the
    last one padded.

    Reading stops when ``spec.max_tokens`` tokens of text are there. A document is tokenised as a
    whole. Special tokens that the text itself spells out stay where they are and count as special,
    not as text.
    """
    length = as_count(length, "length")
    if not callable(tokenizer) or not hasattr(tokenizer, "all_special_ids"):
        raise ValueError(
            f"tokenizer: expected one of transformers, got {type(tokenizer).__name__}; use"
            " AutoTokenizer"
        )

    def encode(texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "truncation": False, "padding": False}
        try:
            ids: list[list[int]] = tokenizer(texts, **options, verbose=False)["input_ids"]
        except Exception as cause:  # the tokenizers library raises nothing more precise
            raise ValueError(
                f"tokenizer: it refused the text ({' '.join(str(cause).split())[:120]}); give other"
                " text"
            ) from cause
        return ids

    before, after = _around(tokenizer) if spec.special else ([], [])
    if length <= len(before) + len(after):
        raise ValueError(
            f"length: expected more than the {len(before) + len(after)} special tokens of a window,"
            f" got {length}; take longer windows, or special=False"
        )
    is_text, text_hash = _is_text(tokenizer), hashlib.sha256()
    rows: list[npt.NDArray[np.int32]] = []
    for text, row in _tokenised(spec, encode, is_text):
        text_hash.update(b"\0" + text.encode("utf-8"))
        if len(row):
            rows.append(row)
    if not any(is_text[row].any() for row in rows):
        raise ValueError(
            "corpus: expected text, got none that this tokenizer has tokens for; give other text"
        )
    padding = next(
        (n for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0
    )
    stretches = rows if spec.documents == "separate" else [np.concatenate(rows)]
    made, text_mask, special = _laid_out(stretches, is_text, before, after, length, int(padding))
    sha256 = hashlib.sha256(f"{made.shape} {text_hash.hexdigest()}".encode())
    masks = text_mask, special, ~(text_mask | special)
    for part in (made.astype("<i4", copy=False), *masks):
        sha256.update(np.ascontiguousarray(part).data)
    return Windows(made, *masks, len(rows), sha256.hexdigest())


def _laid_out(
    stretches: list[npt.NDArray[np.int32]],
    is_text: npt.NDArray[np.bool_],
    before: list[int],
    after: list[int],
    length: int,
    padding: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Rows of before, text, after, padding; a stretch begins in a new row."""
    left, right = len(before), len(after)
    room = length - left - right
    shape = (sum(-(-len(stretch) // room) for stretch in stretches), length)
    ids = np.full(shape, padding, dtype=np.int32)
    text, special = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    ids[:, :left], special[:, :left] = before, True
    row = 0
    for stretch in stretches:
        whole, rest = divmod(len(stretch), room)
        for rows, width, first in ((whole, room, 0), (int(rest > 0), rest, whole * room)):
            here, body = slice(row, row + rows), slice(left, left + width)
            ids[here, body] = stretch[first : first + rows * width].reshape(rows, width)
            text[here, body] = is_text[ids[here, body]]
            special[here, body] = ~text[here, body]
            ids[here, left + width : left + width + right] = after
            special[here, left + width : left + width + right] = True
            row += rows
    return ids, text, special


def _is_text(tokenizer: Any) -> npt.NDArray[np.bool_]:
    """By token id, whether it is text: special tokens are not."""
    special = {int(number) for number in tokenizer.all_special_ids}
    names = ("bos", "eos", "pad", "cls", "sep", "mask")
    if tokenizer.unk_token_id not in [getattr(tokenizer, f"{n}_token_id", None) for n in names]:
        special.discard(tokenizer.unk_token_id)  # a word the model does not know is text
    found = np.ones(max(len(tokenizer), *special, 0) + 1, dtype=bool)
    found[sorted(special)] = False
    return found


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids the model expects before and after a text, read off a short one."""
    for sample in ("a", *list(tokenizer.get_vocab())[:64]):  # of whole words, it may know no other
        with contextlib.suppress(Exception):
            made = tokenizer(sample, return_special_tokens_mask=True, verbose=False)
            places = [i for i, special in enumerate(made["special_tokens_mask"]) if not special]
            if places:
                return made["input_ids"][: places[0]], made["input_ids"][places[-1] + 1 :]
    raise ValueError(
        "tokenizer: its special tokens around a text could not be found; use special=False"
    )


def _tokenised(
    spec: CorpusSpec, encode: Encode, is_text: npt.NDArray[np.bool_]
) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
    """Documents with their ids, until there are ``spec.max_tokens`` tokens of text."""
    documents, most, found = read_documents(spec), spec.max_tokens, 0
    while most is None or found < most:
        left = BATCH if most is None else min(BATCH, 8 * (most - found))
        texts: list[str] = []
        for text in documents:
            texts.append(text)
            left -= len(text)
            if left <= 0:
                break
        if not texts:
            return
        for text, ids in zip(texts, encode(texts), strict=True):
            row = np.array(ids, dtype=np.int32)
            if most is not None:
                row = row[: int(np.searchsorted(np.cumsum(is_text[row]), most - found)) + 1]
            found += int(np.count_nonzero(is_text[row]))
            yield text, row
            if found == most:
                return


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; its id where there is no tokenizer."""
    if tokenizer is None:
        return [str(i) for i in ids]

    def decoded(some: Sequence[int]) -> str:
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(some), **plain))

    found = [decoded(ids[:1])]
    for i in range(1, len(ids)):
        # a token by itself may lose the space before it
        before, both = decoded(ids[i - 1 : i]), decoded(ids[i - 1 : i + 1])
        found.append(both[len(before) :] if both.startswith(before) else decoded(ids[i : i + 1]))
    return found
