"""Text to measure on: where it comes from, and how it becomes windows of token ids."""

from __future__ import annotations

from esscher.models.corpus.documents import CorpusSpec, read_documents
from esscher.models.corpus.windows import Windows, make_windows

__all__ = ["CorpusSpec", "Windows", "make_windows", "read_documents"]
