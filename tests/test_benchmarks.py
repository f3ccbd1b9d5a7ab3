"""The driver of ``make bench``: it runs what has a main, counts what is over its bar, and survives
an exception.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ratio import Measured, ratio_line

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


def drive(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(RUN.read_text("utf-8"), "utf-8")
    command = [sys.executable, str(folder / "run.py"), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("measured", "word"), [(0.9, "ok"), (1.0, "ok"), (1.1, "over")])
def test_line_says_ok_up_to_the_bar(measured: float, word: str) -> None:
    assert ratio_line("stream against softmax", measured, 1.0).split()[-3:] == [
        f"{measured:.3f}",
        "1.000",
        word,
    ]


def test_what_is_over_within_its_noise_is_near() -> None:
    ratio = Measured.of(1.09, 0.06) / Measured.of(1.0, 0.08)
    assert ratio.noise == pytest.approx(0.1)
    assert ratio_line("a", ratio, 1.0).split() == ["a", "±10%", "1.090", "1.000", "near"]
    assert ratio_line("a", ratio, 0.98).split()[-1] == "over"


def test_driver_runs_reports_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def main():\n    raise ValueError('no')\n", "utf-8")
    (tmp_path / "b.py").write_text("def main():\n    return ['b 2.0 1.0 over']\n", "utf-8")
    (tmp_path / "c.py").write_text(
        "import torch\ndef main():\n    print('threads', torch.get_num_threads())\n", "utf-8"
    )
    (tmp_path / "d.py").write_text("x = 1\n", "utf-8")
    everything = drive(tmp_path)
    assert everything.returncode == 1
    assert "a: raised" in everything.stdout
    assert "b 2.0 1.0 over" in everything.stdout
    assert "threads 2" in everything.stdout
    assert drive(tmp_path, "c", "d").returncode == 0
    assert drive(tmp_path, "nothing").returncode == 2
