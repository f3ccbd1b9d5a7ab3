"""Damaged stores: each is refused with one line or repaired to the same tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from esscher.cli import main
from esscher.runs import RunError, execute, load_run
from tests.runs.job import WalkSpec

SHARD = "shards/000001.parquet"
TABLES = ("ends.parquet", "points.parquet")


def cut(file: str, share: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = (run / file).read_bytes()
        (run / file).write_bytes(data[: int(len(data) * share)])

    return damage


def swapped(run: Path) -> None:
    first, second = (run / name for name in TABLES)
    first.rename(run / "x")
    second.rename(first)
    (run / "x").rename(second)


def other_shard(run: Path) -> None:
    shutil.copy(run / "shards/000002.parquet", run / SHARD)


def strays(run: Path) -> None:
    for name in ("000099.parquet", "1.parquet", "copy of 000001.parquet", "x.tmp"):
        shutil.copy(run / SHARD, run / "shards" / name)


REPAIRED: dict[str, Callable[[Path], None]] = {
    **{f"{file} cut to {n}": cut(file, n) for file in (SHARD, *TABLES) for n in (0, 0.5, 0.99)},
    "shard missing": lambda run: (run / SHARD).unlink(),
    "table missing": lambda run: (run / TABLES[0]).unlink(),
    "tables swapped": swapped,
    "shard of another unit": other_shard,
    "other files among the shards": strays,
}
REFUSED = {f"manifest cut to {n}": cut("manifest.json", n) for n in (0, 0.5, 0.99)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return execute(WalkSpec(walks=3), tmp_path_factory.mktemp("sound") / "run").path


@pytest.mark.parametrize("name", [*REPAIRED, *REFUSED])
def test_a_damaged_store_is_refused_or_repaired(
    name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    {**REPAIRED, **REFUSED}[name](run)
    with pytest.raises(SystemExit) as stop:
        main(["resume", str(run)])
    lines = capsys.readouterr().err.splitlines()
    if name in REFUSED:
        assert stop.value.code == 2
        assert sum(line.startswith("esscher: ") for line in lines) == 1
        return
    assert not stop.value.code
    for table in TABLES:
        assert (run / table).read_bytes() == (sound / table).read_bytes()


def test_a_table_of_the_wrong_content_is_not_read(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    swapped(tmp_path / "run")
    with pytest.raises(RunError, match=r"is not the table this run made; esscher resume .* anew"):
        load_run(tmp_path / "run").table("ends")
