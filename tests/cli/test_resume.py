"""Ctrl-C on the command line, and how a resumed run ends: with what the command that began it
leaves.
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import run

QUICK = (
    "job: converge\nlaw: {law: gaussian, dim: 2}\nhead: {horizon: 0.3}\nn: 20,60,200\nmetrics:"
    " [l2]\nqueries: 4\ntitle: small\n"
)
PATIENCE = 90.0  # seconds a loaded machine may take; nothing is asserted of it


def under_a_terminal(arguments: list[str], stop_at: str) -> tuple[int, str]:
    """Exit code and what the screen shows of the command line in a terminal of its own; Ctrl-C
    where ``stop_at`` appears.
    """
    pid, screen = pty.fork()
    if pid == 0:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # whoever started the tests in the background ignores it, and that is handed on
        os.execv(sys.executable, [sys.executable, "-m", "esscher", *arguments])
    shown, stopped, end = b"", False, time.monotonic() + PATIENCE
    try:
        while time.monotonic() < end:
            if not select.select([screen], [], [], 0.1)[0]:
                continue
            try:
                shown += os.read(screen, 1 << 16)
            except OSError:  # the other side is gone
                break
            if not stopped and stop_at.encode() in shown:
                os.write(screen, b"\x03")
                stopped = True
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(screen)
    assert stopped, shown
    return code, shown.decode(errors="replace")


def test_ctrl_c_ends_with_the_command_to_go_on(tmp_path: Path) -> None:
    file, out = tmp_path / "long.yaml", tmp_path / "run"
    file.write_text(QUICK + "repeats: 200000\n")
    code, shown = under_a_terminal(
        ["converge", str(file), "--out", str(out), "--no-report"], stop_at="left"
    )
    assert code == 130
    assert f"To continue: esscher resume {out}" in " ".join(shown.split())
    assert "Traceback" not in shown


def test_resume_ends_as_the_command_would_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "quick.yaml", tmp_path / "run"
    file.write_text(QUICK + "repeats: 24\n")
    code, shown, err = run(["converge", str(file), "--out", str(out)], capsys)
    assert code == 0, err
    for name in ("report.html", "rates.parquet"):
        (out / name).unlink()
    next((out / "shards").iterdir()).unlink()
    code, again, err = run(["resume", str(out)], capsys)
    assert code == 0, err
    assert again == shown
    assert "exponent" in again
    assert (out / "report.html").exists()
    assert f"report: {out / 'report.html'}" in err


def test_a_page_of_what_a_run_no_longer_is_goes_when_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "quick.yaml", tmp_path / "run"
    file.write_text(QUICK + "repeats: 24\n")
    assert run(["converge", str(file), "--out", str(out)], capsys)[0] == 0
    asked = ["converge", str(file), "--out", str(out), "--no-report"]
    assert run(asked, capsys)[0] == 0
    assert (out / "report.html").exists()  # nothing was left to do
    shutil.rmtree(out / "shards")
    assert run(asked, capsys)[0] == 0
    assert not (out / "report.html").exists()
