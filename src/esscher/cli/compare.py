"""``esscher compare``: one model on several texts, or on one text in several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from esscher.cli.options import All, Markdown, Sort, Top, given
from esscher.cli.output import Json, brief, log, path_argument, path_option, print_json, show

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs import Run


def compare(
    runs: Annotated[list[Path], path_argument("Two or more run directories of esscher probe.")],
    out: Annotated[
        Path | None, path_option("--out", "Page with the runs side by side; none when left out.")
    ] = None,
    top: Top = None,
    sort: Sort = None,
    markdown: Markdown = False,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Compare the heads of one model on several texts: rank correlations between the runs.

    --all also prints the median of each run. Where runs differ in --max-tokens alone, it says how
    often the intervals of the smallest pool hold the numbers of the larger ones.

    Example: esscher compare runs/prose runs/code --out both.html
    """
    look = given(locals())
    from esscher.report import write_report
    from esscher.runs import load_run
    from esscher.runs.columns import columns_of

    loaded = [load_run(path) for path in runs]
    tables = _compared(loaded)
    page = None if out is None else write_report(loaded, out, tables["domain_ranks"])
    if as_json:
        records = {name: table.to_pylist() for name, table in tables.items()}
        return print_json({"page": None if page is None else str(page), **records})
    for name, table in tables.items() if everything else list(tables.items())[:1]:
        title = f"{name.replace('_', ' ')}: {', '.join(run.path.name for run in loaded)}"
        style = look if everything else brief(look)
        show(title, table.to_pandas(), columns_of(table.schema), style)
    if page is not None:
        log(f"page: {page}")


def _compared(runs: Sequence[Run]) -> dict[str, pa.Table]:
    """Tables ``domain_ranks`` and ``domains`` of the heads; before them ``pool_sizes`` where the
    sizes of the pools alone differ.
    """
    import pyarrow as pa

    from esscher.probe import agreement
    from esscher.runs.columns import declare

    names = [run.path.name for run in runs]
    if len(set(names)) < max(2, len(runs)):
        told = ", ".join(names)
        raise ValueError(f"runs: expected two or more, in folders of different names, got {told}")
    for run in runs:
        if run.manifest.job != "probe" or "heads" not in run.tables:
            raise ValueError(f"{run.path}: expected a finished run of esscher probe")
        if run.manifest.hashes.get("model") != runs[0].manifest.hashes.get("model"):
            raise ValueError(
                f"{run.path}: its model is not that of {runs[0].path}, so heads cannot be paired;"
                " esscher report shows both side by side"
            )
    heads = {run.path.name: run.table("heads") for run in runs}
    domains, ranks = agreement.compare_domains(heads, runs[0].spec.get("seed", 0))
    frames = {"domain_ranks": ranks, "domains": domains}
    pools = {int(run.table("about")["tokens"].iloc[0]): run for run in runs}
    texts = [{**run.spec["corpus"], "max_tokens": None} for run in runs]
    pooled = all(run.spec["pool"] == "corpus" and "endless" in run.tables for run in runs)
    if pooled and len(pools) == len(runs) and all(text == texts[0] for text in texts):
        endless = {size: run.table("endless") for size, run in pools.items()}
        frames = {"pool_sizes": agreement.compare_sizes(endless), **frames}
    declared = {
        "pool_sizes": agreement.SIZE_COLUMNS,
        "domain_ranks": agreement.RANK_COLUMNS,
        "domains": agreement.DOMAIN_COLUMNS,
    }
    return declare({name: pa.Table.from_pandas(frame) for name, frame in frames.items()}, declared)
