"""``esscher predict``: exact errors and every prediction for a law and a head, at any n."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from esscher.cli.options import Fields, Given
from esscher.cli.output import (
    Json,
    Look,
    as_dtype,
    check_device,
    log,
    path_argument,
    path_option,
    print_json,
)

SPEC, SETTING = (
    "esscher.cli.prediction_spec:PredictSpec",
    "esscher.cli.prediction_spec:SettingFlags",
)
LAWS = ("gaussian", "sphere", "ball", "cube", "rademacher", "laplace")
LAW = Fields(SETTING, (*LAWS, "dim", "size"))
HEAD = Fields("esscher.errors.montecarlo.spec:HeadSpec", ("horizon", "scale"))
RANDOM = Fields(SETTING, ("random_head",))
ASKED = Fields(SPEC, ("n", "queries", "epsilon"))
GIVEN = Fields(SPEC, ("seed", "dtype"), defaults=True)  # before what the file says
DEVICE = Fields("esscher.runs.spec:RunSpec", ("device",), defaults=True)


def predict(
    setting: Annotated[Given, LAW, HEAD, RANDOM],
    asked: Annotated[Given, ASKED, GIVEN, DEVICE],
    look: Look,
    spec: Annotated[
        Path | None, path_argument("YAML file with law, head, n ...; flags override it.", "FILE")
    ] = None,
    figure: Annotated[
        Path | None,
        path_option("--figure", "Figure file to write (.svg, .pdf, .png); none when left out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Exact error, local slope and every bound and rate that applies, for a law of tokens and a
    head, at any n.

    Example: esscher predict --gaussian --dim 50 --horizon 1.5 --n 1e3:1e12
    """
    from esscher.cli.prediction import evaluate, needed_tokens, record, show
    from esscher.cli.prediction_spec import PredictSpec
    from esscher.report.figures import save_predictions
    from esscher.report.formats import check_format
    from esscher.runs.files import check_output
    from esscher.runs.spec import read_mapping

    device = asked.pop("device")
    found = read_mapping(spec) if spec is not None else {}
    parts = {
        "law": _law(_mapping(found, "law"), setting),
        "head": _head(_mapping(found, "head"), setting, asked["seed"]),
    }
    as_dtype(asked["dtype"])
    if figure is not None:
        check_format(figure)
        check_output(figure)
    check_device(device)
    checked = PredictSpec.model_validate({**found, **parts, **asked})
    curve, predicted = evaluate(checked, device)
    needed = needed_tokens(curve, checked.epsilon)
    if as_json:
        print_json(record(checked, curve, predicted, needed))
    else:
        show(checked, curve, predicted, needed, look)
    if figure is not None:
        save_predictions(curve, predicted, figure)
        log(f"figure: {figure}")


def _mapping(found: dict[str, Any], part: str) -> dict[str, Any]:
    """The law or the head of a YAML file; empty where it has none."""
    fields = found.get(part, {})
    if not isinstance(fields, dict):
        raise ValueError(f"{part}: expected a mapping of fields, got {type(fields).__name__}")
    return dict(fields)


def _law(law: dict[str, Any], flags: Given) -> dict[str, Any]:
    """Fields of the law, flags before the file."""
    chosen = [name for name in LAWS if name in flags]
    if len(chosen) > 1:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)}, got --{' --'.join(chosen)}")
    if chosen:
        law["law"] = chosen[0]
    if not law:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)} with --dim, or a YAML file")
    if "dim" in flags:
        law["dim"] = flags["dim"]
    if "size" in flags:
        from esscher.measures.fields import LAWS as FIELDS
        from esscher.measures.fields import LawFields

        law[FIELDS.get(str(law.get("law")), LawFields).size] = flags["size"]
    return law


def _head(head: dict[str, Any], flags: Given, seed: int) -> dict[str, Any]:
    """Fields of the head, flags before the file."""
    head |= {name: flags[name] for name in ("horizon", "scale") if name in flags}
    return head | {"kind": "random", "seed": seed} if "random_head" in flags else head
