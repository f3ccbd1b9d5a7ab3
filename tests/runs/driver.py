"""Runs in processes of their own: one interpreter that forks a process per run, since starting one
takes seconds.

Reads lines ``["execute" | "resume", argument, path, options]`` in JSON; answers each with the pid
of the process that does it and, when that one has ended, with its exit code and what it had to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Driver:
    """The process that forks, seen from a test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runs.driver"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, verb: str, argument: Any, path: Path, **options: Any) -> int:
        """Begin a run in a new process; its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, argument, str(path), options]) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["pid"])

    def wait(self) -> tuple[int, str]:
        """Exit code of the process begun last (minus the signal that ended it), and its last
        words.
        """
        answer = self._answer()
        return answer["code"], answer["said"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the driver died"
        return json.loads(line)

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with a run that a failed test may have left
        self._process.communicate()


@contextlib.contextmanager
def driving() -> Iterator[Driver]:
    driver = Driver()
    try:
        yield driver
    finally:
        driver.end()


def main() -> None:
    # A shell without job control starts background jobs with Ctrl-C ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Once, for all that are forked: what each would load and look up.
    import pandas  # noqa: F401

    import tests.runs.job  # noqa: F401
    from esscher.runs import run as provenance

    provenance.versions(), provenance.commit()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stderr = sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for line in sys.stdin:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code, said = _one(*json.loads(line))
            os.write(writer, said.encode()[:4000])
            os._exit(code)
        os.close(writer)
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = os.read(reader, 4096).decode()
        os.close(reader)
        print(json.dumps({"code": code, "said": said}), file=answers, flush=True)


def _one(verb: str, argument: Any, path: str, options: dict[str, Any]) -> tuple[int, str]:
    from esscher import runs

    try:
        if verb == "execute":
            runs.execute(argument, path, **options)
        else:
            runs.resume(path, **options)
    except runs.RunInterrupted as stopped:
        return 130, str(stopped)
    except runs.RunIncomplete as incomplete:
        return 3, str(incomplete)
    except Exception as refused:
        return 2, f"{type(refused).__name__}: {refused}"
    return 0, ""


if __name__ == "__main__":
    main()
