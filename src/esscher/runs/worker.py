"""A local worker: reads units from standard input, stores their shards, answers on standard output,
a line each.

Run as ``python -m esscher.runs.worker`` by the module ``processes`` beside it. It ends
when its input does, so it never outlives the process that started it, even when that one is killed
in the middle of a unit.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from esscher.runs.errors import StoreError
from esscher.runs.executors import Order, compute_shard, describe
from esscher.runs.progress import advancing
from esscher.runs.store import Store


def main() -> None:
    # What a job prints must not mix with the answers: it goes where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines = _lines()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        start = json.loads(lines.get())
        order, store = Order(**start["order"]), Store(Path(start["path"]))
        job, spec = order.load()
    except Exception as cause:
        answer(fatal=f"a worker cannot start: {describe(cause)[0]}")
        return
    answer(ready=True)
    while True:
        task = json.loads(lines.get())
        index = task["index"]
        try:
            with advancing(functools.partial(_tell, answer, index)):
                data = compute_shard(job, spec, order.header, index, task["unit"])
        except (Exception, SystemExit) as cause:
            reason, traceback = describe(cause)
            answer(index=index, reason=reason, traceback=traceback)
            continue
        try:
            store.write_shard(index, data)
        except StoreError as cause:
            answer(fatal=str(cause))
            return
        answer(index=index)


def _tell(answer: Callable[..., None], index: int, share: float) -> None:
    answer(index=index, share=share)


def _lines() -> queue.SimpleQueue[str]:
    """Lines of standard input, read by a thread of its own that ends the process at the end of
    input.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


if __name__ == "__main__":
    main()
