"""Store: the records of a benchmark on disk, appended one by one, and what a resumed run need not measure again."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvbaton.base.errors import ConfigError
from kvbaton.workload.record import CellResult, Header, Record, Skipped, TokenCheck, decode, encode

FILE_NAME: Final = "results.jsonl"


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    """What a measured cell is found by."""

    contender: str
    repeat: int
    link: str
    prompt_tokens: int
    rate_per_s: float | None


class Store:
    """All records of one output folder.

    Owner: the benchmark's main thread; one process at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._records = read_records(self.path)
        self._whole = False

    @property
    def records(self) -> tuple[Record, ...]:
        """Everything written so far."""
        return tuple(self._records)

    def append(self, record: Record) -> None:
        """Write a record down before anything else happens."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._whole:
            cut_half_line(self.path)
            self._whole = True
        with self.path.open("ab") as file:
            file.write(encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._records.append(record)

    def require_same(self, settings: dict[str, str]) -> None:
        """Refuse to mix results that cannot stand in one table.

        Raises:
            ConfigError: an earlier run in this folder had another setting.
        """
        for record in self._records:
            if not isinstance(record, Header):
                continue
            for key, value in settings.items():
                if record.settings.get(key, value) != value:
                    raise ConfigError(
                        f"--{key.replace('_', '-')}",
                        value,
                        f"{record.settings[key]!r} as in {self.path}, or another --out",
                    )

    def done(self) -> set[CellKey]:
        """Cells that need not be measured again."""
        return done_cells(self._records)

    def checks(self) -> dict[str, TokenCheck]:
        """Token checks by contender, the last one wins."""
        return {record.contender: record for record in self._records if isinstance(record, TokenCheck)}


def done_cells(records: Iterable[Record]) -> set[CellKey]:
    """Keys of measured cells and of those skipped for good."""
    return {
        CellKey(record.contender, record.repeat, record.link, record.prompt_tokens, record.rate_per_s)
        for record in records
        if isinstance(record, CellResult) or (isinstance(record, Skipped) and record.final)
    }


def read_records(path: Path) -> list[Record]:
    """Read a file of records; one that does not exist is empty.

    A run killed while writing leaves half a last line, which is passed over. Anything else that cannot be read is an error.

    Raises:
        ConfigError: a line in the middle is no record.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            records.append(decode(line))
        except ValueError as error:
            raise ConfigError(
                "--out", f"{path}:{number}", f"a line written by this version ({error})"
            ) from error
    return records


def cut_half_line(path: Path) -> None:
    """Remove what follows the last line end, so that the next record starts a line."""
    if path.exists():
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
