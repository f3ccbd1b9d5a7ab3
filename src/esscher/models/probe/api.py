"""``es.probe``: every head of a model measured on text."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from esscher.models.corpus import CorpusSpec
from esscher.models.huggingface.checkpoint import written
from esscher.models.huggingface.loading import wrap_model
from esscher.models.probe.context import OBJECT
from esscher.models.probe.memory import context_of
from esscher.models.probe.spec import KEYS, ProbeSpec
from esscher.runs import Run, execute

__all__ = ["probe"]


def probe(
    model: Any = None,
    texts: Any = None,
    *,
    tokenizer: Any = None,
    out: Any = None,
    workers: int = 1,
    dask: str | None = None,
    progress: Any = None,
    **settings: Any,
) -> Run:
    """Measure every head of a model on text; the run has tables heads, curves, scores, tails, layers, budget and about.

    A run whose pool is the query's own context has frontier too, the errors of keep rules, and rule_budget, what each needs.

    ``model``: a packaged model ("minilm", which None is too, or "smollm2"), a hub name, a folder, a GGUF file, or a
    transformers model (with its ``tokenizer``).
    ``texts``: a document or a list of them, or paths (``pathlib.Path``) of files and folders; None for the packaged prose.
    ``out``: the run's folder; one in the system's temporary folder when left out. The other settings are the fields of
    :class:`ProbeSpec` and of its corpus: ``max_tokens=100_000``, ``layers=(0, 1)``, ``queries=64``, ``dataset="name"`` ...
    or ``corpus={...}`` with all of these.
    """
    loaded = None
    if model is not None and not isinstance(model, str | Path):
        if workers > 1 or dask is not None:
            raise ValueError("workers: a model given as an object stays in this process; save it in a folder and give that")
        loaded = wrap_model(model, tokenizer)
        model = f"{OBJECT}{loaded.sha256[:16]}"
    else:
        model = written(model)
    folder = Path(tempfile.mkdtemp(prefix="esscher-")) if out is None else Path(out)
    # `special` is a field of both: here it says, as the flag does, that special tokens are part of the pool
    fields_of_text = CorpusSpec.model_fields.keys() - ProbeSpec.model_fields.keys()
    own = {name: settings.pop(name) for name in list(settings) if name in fields_of_text}
    corpus = {"max_tokens": KEYS, **settings.pop("corpus", {}), **own, **_texts(texts, folder)}
    if isinstance(rules := settings.get("rules"), list | tuple):
        settings["rules"] = [str(rule) for rule in rules]  # a rule may be given as an object
    spec = ProbeSpec.read({"model": model, "corpus": corpus, **settings})
    if loaded is not None:
        spec = context_of(spec, loaded=loaded).spec  # the units find it there
    return execute(spec, folder, workers=workers, dask=dask, progress=progress)


def _texts(texts: Any, folder: Path) -> dict[str, Any]:
    """Fields of the corpus; documents are written into the run's folder, so that every process can read them."""
    if texts is None:
        return {}
    given = [texts] if isinstance(texts, str | Path) else list(texts)
    paths = [text for text in given if isinstance(text, Path)]
    if given and len(paths) == len(given):
        return {"text": [str(path.expanduser().absolute()) for path in paths]}
    if not given or not all(isinstance(text, str) for text in given):
        kinds = ", ".join(sorted({type(text).__name__ for text in given})) or "nothing"
        raise ValueError(f"texts: expected strings (documents) or pathlib.Path (files), got {kinds}")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join(str(text) for text in given).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    path = folder / f".texts-{digest}.parquet"  # hidden: a run begins in an empty folder; other texts are another spec
    pd.DataFrame({"text": given}).to_parquet(path)
    return {"text": [str(path.absolute())], "field": "text"}
