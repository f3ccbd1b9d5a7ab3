"""``esscher report``: a stored run as one HTML page, and its figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esscher.cli.output import Json, figure_formats, log, path_argument, path_option, print_json
from esscher.report.formats import FORMATS


def report(
    runs: Annotated[list[Path], path_argument("Run directories; several are set side by side.")],
    out: Annotated[
        Path | None, path_option("--out", "The page; report.html in the first run when left out.")
    ] = None,
    figures: Annotated[
        str,
        typer.Option(
            "--figures", help=f"Figure files too: {', '.join(FORMATS)}, separated by commas."
        ),
    ] = "",
    figures_out: Annotated[
        Path | None,
        path_option("--figures-out", "Folder of the figures; figures in the run when left out."),
    ] = None,
    show: Annotated[
        str, typer.Option("--open", help="With yes the page opens in a browser.")
    ] = "no",
    as_json: Json = False,
) -> None:
    """Turn stored runs into one page that needs nothing else: mail it, archive it, open it offline.

    Example: esscher report runs/mine --figures svg,pdf
    """
    from esscher.papers.judge import read_verdicts
    from esscher.report import write_report
    from esscher.report.reproduce import write_verdicts
    from esscher.report.run_figures import save_figures
    from esscher.runs import load_run, read_group

    if show not in ("yes", "no"):
        raise ValueError(f"--open: expected yes or no, got {show!r}")
    if len(runs) == 1 and (verdicts := read_verdicts(runs[0])) is not None:
        page = write_verdicts(runs[0], verdicts, out)
        print_json({"page": str(page), "figures": []}) if as_json else log(f"page: {page}")
        return
    groups = {path: read_group(path) for path in runs}
    loaded = [load_run(path / name) for path in runs for name in groups[path] or ("",)]
    formats = figure_formats(figures)
    if formats and figures_out is not None:
        figures_out.mkdir(parents=True, exist_ok=True)
    page = write_report(loaded, out, runs[0] if len(runs) == 1 and groups[runs[0]] else None)
    written: list[Path] = []
    for run in loaded if formats else []:
        folder = figures_out or run.path / "figures"
        written += save_figures(
            run, formats, folder / run.path.name if figures_out and len(loaded) > 1 else folder
        )
    if as_json:
        print_json({"page": str(page), "figures": [str(file) for file in written]})
    else:
        log(f"page: {page}")
        for file in written:
            log(f"figure: {file}")
    if show == "yes":
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
