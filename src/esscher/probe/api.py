"""``es.probe``: every head of a model measured on text."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd

from esscher.hf.checkpoint import written
from esscher.hf.loading import wrap_model
from esscher.probe.job import open_probe
from esscher.probe.session import OBJECT, Session
from esscher.probe.spec import SMALLEST, ProbeSpec, read_settings
from esscher.runs import Run, execute, watched
from esscher.runs.run import refuse_foreign

RUNS = Path("runs")
LEFT_OPEN = {"pool": "auto"}  # of a spec, until the model is known
FILE_NAME = re.compile(r"[^\s\\]*(/[^\s\\]*|\.(txt|md|rst|jsonl?|csv|tsv|parquet|gz|html?|py))")


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
    """Measure every head of a model on text; the run has tables heads, curves, scores, tails,
    layers, budget and about.

    A run whose pool is the query's own context has frontier too: the errors of keep rules.

    ``model``: a packaged model ("minilm", which None is too, or "smollm2"), a hub name, a folder, a
    GGUF file, or a transformers model (with its ``tokenizer``). ``texts``: a document or a list of
    them, or files and folders: ``pathlib.Path``, or a string that names one; None for the packaged
    prose. ``out``: the run's folder, ``runs/MODEL-HASH`` when left out, as on the command line.
    What is finished there is not computed again. ``progress``: True or False; by default in a
    terminal and in a notebook; or a function of a :class:`esscher.runs.Progress`. The other
    settings are the fields of :class:`ProbeSpec` and of its corpus, named as the flags are:
    ``max_tokens=100_000``, ``layers=range(2)``, ``queries=64``, ``epsilon=0.1``, ``dataset="name"``
    ... or ``corpus={...}`` with all of a corpus.
    """
    fields = read_settings(settings)  # a mistake is told before anything is written or read
    loaded = None
    if model is not None and not isinstance(model, str | Path):
        if workers > 1 or dask is not None:
            raise ValueError(
                "workers: a model given as an object stays in this process; save it in a folder and"
                " give that"
            )
        loaded = wrap_model(model, tokenizer)
        model = f"{OBJECT}{loaded.sha256[:16]}"
    else:
        model = written(model)
    if out is not None:
        refuse_foreign(Path(out))
    fields["corpus"] |= _texts(texts, RUNS / ".texts" if out is None else Path(out))
    spec = ProbeSpec.read({"model": model, **fields})
    if out is not None:
        refuse_foreign(Path(out), spec, left_open=LEFT_OPEN)
    session = open_probe(spec, loaded)
    if (few := too_few_keys(session)) is not None:
        warnings.warn(few, stacklevel=2)
    folder = run_folder(session) if out is None else Path(out)
    report = watched(progress)
    if report is not None:
        print(f"run: {folder}", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"workers": workers, "dask": dask, "progress": report}
    run = execute(session.spec, folder, **where, opened=session)
    check_measured(run)
    return run


def check_measured(run: Run) -> None:
    """ValueError where no head of a probe was measured, with the reason most of them have."""
    heads = run.table("heads")
    if not (heads["status"] == "ok").any():
        reason = heads["reason"].mode().iloc[0]
        raise ValueError(f"{run.path}: none of {len(heads)} heads could be measured: {reason}")


def run_folder(session: Session) -> Path:
    """Where a run goes unless told: a folder for each model and spec, so that the same probe finds
    its run again.
    """
    return RUNS / f"{short_name(session.loaded.name)}-{session.spec.hash[:8]}"


def short_name(model: str) -> str:
    """A model's name as a file name."""
    last = model.rsplit("/", 1)[-1]
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in last)[:60].strip(".") or "model"


def too_few_keys(session: Session) -> str | None:
    """A sentence where the pool of a corpus has too few keys to say much; None elsewhere."""
    if session.spec.pool == "sequence" or session.keys >= SMALLEST:
        return None
    return (
        f"the pool has {session.keys} keys: errors and exponents of fewer than {SMALLEST} say"
        " little; give more text"
    )


def _texts(texts: Any, folder: Path) -> dict[str, Any]:
    """Fields of the corpus; documents are written into a folder, so that every process can read
    them.
    """
    if texts is None:
        return {}
    given = [texts] if isinstance(texts, str | Path) else list(texts)
    files = [text for text in given if isinstance(text, Path) or _names_a_file(text)]
    if given and len(files) == len(given):
        return {"text": [str(Path(file).expanduser().absolute()) for file in files]}
    if not given or not all(isinstance(text, str) and text not in files for text in given):
        kinds = (
            ", ".join(
                sorted({"a file" if text in files else type(text).__name__ for text in given})
            )
            or "nothing"
        )
        raise ValueError(
            "texts: expected strings (documents) or pathlib.Path (files), all of one kind, got"
            f" {kinds}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(
        "\0".join(str(text) for text in given).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]
    # hidden: a run begins in an empty folder; other texts are another spec
    path = folder / f".texts-{digest}.parquet"
    pd.DataFrame({"text": given}).to_parquet(path)
    return {"text": [str(path.absolute())], "field": "text"}


def _names_a_file(text: Any) -> bool:
    """Whether a string is the name of a file or folder; one that looks like it and is none is a
    mistake.
    """
    if (
        not isinstance(text, str)
        or not text.strip()
        or len(text) > 1024
        or "\n" in text
        or "\0" in text
    ):
        return False
    try:
        if os.path.exists(os.path.expanduser(text)):
            return True
    except OSError:  # too long for a name
        return False
    if FILE_NAME.fullmatch(text):
        raise ValueError(
            f"texts: {text!r} looks like a file and there is none of this name; give its path, or a"
            " document"
        )
    return False
