"""``esscher predict``: exact errors and every prediction for a law and a head, at any n."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from esscher.cli.output import (
    Device,
    Dtype,
    Json,
    Seed,
    as_dtype,
    check_device,
    log,
    path_argument,
    path_option,
    print_json,
)

__all__ = ["predict"]

LAWS = ("gaussian", "sphere", "ball", "cube", "rademacher", "laplace")


def predict(
    spec: Annotated[Path | None, path_argument("YAML file with law, head, n ...; flags override it.", "FILE")] = None,
    gaussian: Annotated[bool, typer.Option("--gaussian", help="Gaussian tokens.")] = False,
    sphere: Annotated[bool, typer.Option("--sphere", help="Tokens uniform on a sphere.")] = False,
    ball: Annotated[bool, typer.Option("--ball", help="Tokens uniform in a ball.")] = False,
    cube: Annotated[bool, typer.Option("--cube", help="Tokens uniform in a cube.")] = False,
    rademacher: Annotated[bool, typer.Option("--rademacher", help="Tokens with coordinates +-scale.")] = False,
    laplace: Annotated[bool, typer.Option("--laplace", help="Tokens with Laplace coordinates.")] = False,
    dim: Annotated[int | None, typer.Option(help="Dimension of a token.")] = None,
    size: Annotated[
        float | None, typer.Option(help="Variance, radius, half width or scale of the law, whichever it has.")
    ] = None,
    horizon: Annotated[float | None, typer.Option(help="Two-sided horizon the head is scaled to.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor on the head's scores, instead of --horizon.")] = None,
    random_head: Annotated[bool, typer.Option("--random-head", help="Random W_q, W_k, W_v instead of A = V = I.")] = False,
    n: Annotated[str | None, typer.Option(help="Token numbers: 1e3:1e12, 1e3:1e12:40 or 100,1000.")] = None,
    queries: Annotated[int | None, typer.Option(help="Queries drawn where their law cannot be integrated.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Relative error to find the tokens needed for.")] = None,
    figure: Annotated[
        Path | None, path_option("--figure", "Figure file (.svg, .pdf, .png); predict.svg when left out, none with --json.")
    ] = None,
    no_figure: Annotated[bool, typer.Option("--no-figure", help="Write no figure.")] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float64",
    as_json: Json = False,
) -> None:
    """Exact error, local slope and every bound and rate that applies, for a law of tokens and a head, at any n.

    Example: esscher predict --gaussian --dim 50 --horizon 1.5 --n 1e3:1e12
    """
    from esscher.cli.prediction import evaluate, needed_tokens, record, show
    from esscher.cli.prediction_spec import PredictSpec
    from esscher.report.figures import save_predictions
    from esscher.report.formats import check_format
    from esscher.runs.files import check_output
    from esscher.runs.spec import read_mapping

    flags = {
        "gaussian": gaussian,
        "sphere": sphere,
        "ball": ball,
        "cube": cube,
        "rademacher": rademacher,
        "laplace": laplace,
    }
    chosen = [name for name in LAWS if flags[name]]
    settings = read_mapping(spec) if spec is not None else {}
    _merge_flags(settings, chosen, dim, size, horizon, scale, random_head, seed)
    for name, value in {"n": n, "queries": queries, "epsilon": epsilon}.items():
        if value is not None:
            settings[name] = value
    settings |= {"seed": seed, "dtype": dtype}
    as_dtype(dtype)
    if figure is None and not as_json:
        figure = Path("predict.svg")
    if no_figure:
        figure = None
    if figure is not None:
        check_format(figure)
        check_output(figure)
    check_device(device)
    checked = PredictSpec.model_validate(settings)
    curve, found = evaluate(checked, device)
    needed = needed_tokens(curve, checked.epsilon)
    if as_json:
        print_json(record(checked, curve, found, needed))
    else:
        show(checked, curve, found, needed)
    if figure is not None:
        save_predictions(curve, found, figure)
        log(f"figure: {figure}")


def _merge_flags(
    settings: dict[str, Any],
    chosen: list[str],
    dim: int | None,
    size: float | None,
    horizon: float | None,
    scale: float | None,
    random_head: bool,
    seed: int,
) -> None:
    """Write the flags into the settings of a YAML file (or into empty ones)."""
    if len(chosen) > 1:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)}, got --{' --'.join(chosen)}")
    for part in ("law", "head"):
        if not isinstance(settings.get(part, {}), dict):
            raise ValueError(f"{part}: expected a mapping of fields, got {type(settings[part]).__name__}")
    law = dict(settings.get("law", {}))
    if chosen:
        law["law"] = chosen[0]
    if not law:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)} with --dim, or a YAML file")
    if dim is not None:
        law["dim"] = dim
    if size is not None:
        from esscher.measures.fields import LAWS as FIELDS
        from esscher.measures.fields import LawFields

        law[FIELDS.get(str(law.get("law")), LawFields).size] = size
    settings["law"] = law
    head = dict(settings.get("head", {}))
    head |= {key: value for key, value in {"horizon": horizon, "scale": scale}.items() if value is not None}
    if random_head:
        head |= {"kind": "random", "seed": seed}
    settings["head"] = head
