"""Trace: the records of a run, and the file that stores them as JSON Lines.

The first line is a header with the format's version and the facts of the run. Each later line is one step. Values
are checked against the records' types (`json_reader.py`), and steps for consistency (`validation.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minillm.errors import TraceError
from minillm.trace.json_reader import from_json, parse_object, to_json
from minillm.trace.records import RunFacts, StepRecord
from minillm.trace.validation import check_facts, check_step

FORMAT_VERSION = 5
OLDER_VERSIONS = (2, 3, 4)  # converted when they are read; see `_upgrade`
HEADER_KEY = "minillm_trace"  # the first key of the header; its value is the version


@dataclass
class Trace:
    """A run: its facts, and the records of its steps in order. Iterating over a trace yields the records.

    Attributes
    ----------
    facts : RunFacts
    steps : the records. Their `step` numbers have no gaps; the first one need not be 0.
    """

    facts: RunFacts
    steps: list[StepRecord] = field(default_factory=list)

    def append(self, record: StepRecord) -> None:
        """Add the next step. The engine repeats a record if an exception interrupted its delivery; it is added once."""
        if not self.steps or self.steps[-1] is not record:
            self.steps.append(record)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to `path`, in UTF-8: a header line, then one line per step.

        The trace replaces an existing one only when it is complete.

        Raises
        ------
        TraceError
            `path` is an existing file that is not a trace, such as a model. It is not overwritten.
        OSError
            The file cannot be written.
        """
        path = Path(path).resolve()  # a link is kept, and the file that it names is replaced
        _check_replaceable(path)
        if path.exists() and not path.is_file():  # a pipe or a device
            self._write_lines(path)
            return
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            self._write_lines(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _write_lines(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for line in self.lines():
                file.write(line + "\n")

    def lines(self) -> Iterator[str]:
        """Return the lines of the file, without line ends."""
        yield json.dumps({HEADER_KEY: FORMAT_VERSION, "run": asdict(self.facts)})
        for record in self.steps:
            yield json.dumps(to_json(record))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that `write` wrote to `path`.

        Raises
        ------
        TraceError
            The file is not a trace, has an unknown version, is truncated, or contradicts itself; the message names the
            line. A file that was truncated exactly at the end of a line is read as a shorter run.
        OSError
            The file cannot be read.
        """
        with Path(path).open("rb") as file:
            facts, version = _read_header(next(file, b""), f"{path}: line 1")
            trace = cls(facts)
            for number, line in enumerate(file, start=2):
                location = f"{path}: line {number}"
                values = parse_object(line, location)
                if HEADER_KEY in values:
                    raise TraceError(f"{location} is a second header: the file holds two traces; split it before it")
                if version != FORMAT_VERSION:
                    _upgrade(values, facts.num_groups, location)
                record = from_json(StepRecord, values, location)
                check_step(record, trace.steps[-1] if trace.steps else None, facts, location)
                trace.append(record)
        return trace

    def __repr__(self) -> str:
        return f"Trace({len(self)} steps of {self.facts.model}, {self.facts.policy})"


def _check_replaceable(path: Path) -> None:
    if not path.is_file():
        return
    beginning = f'{{"{HEADER_KEY}": '.encode()
    with path.open("rb") as file:
        if not beginning.startswith(file.read(len(beginning))):  # a truncated trace may be shorter than that
            raise TraceError(f"{path} exists and is not a trace; name another file, or delete it first")


def _read_header(line: bytes, location: str) -> tuple[RunFacts, int]:
    """Return the facts of the run and the format's version, from the first line."""
    if not line:
        raise TraceError(f"{location} is missing: the file is empty; expected a header line")
    header = parse_object(line, location)
    if HEADER_KEY not in header:
        raise TraceError(f"{location} is not the header of a trace: it has no key {HEADER_KEY!r}")
    version = header[HEADER_KEY]
    if type(version) is not int or version not in (FORMAT_VERSION, *OLDER_VERSIONS):
        raise TraceError(
            f"{location}: the trace has version {version!r}, but this minillm reads versions {OLDER_VERSIONS[0]} to "
            f"{FORMAT_VERSION}; record the run again"
        )
    run = header.get("run")
    if version in (2, 3) and isinstance(run, dict):
        run = {**run, "windows": [None]}  # these versions have a single KV-cache group
    facts = from_json(RunFacts, run, f"{location}, run")
    check_facts(facts, f"{location}, run")
    return facts, version


def _upgrade(step: dict[str, Any], num_groups: int, location: str) -> None:
    """Convert a step of versions 2 to 4 in place: each `block_table` becomes `block_tables`, one per KV-cache group.

    Up to version 4, one list held the blocks of all groups side by side: block 0 of each group, then block 1, ...
    """
    for name in ("chunks", "running"):
        entries = step.get(name)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("block_table"), list):
                blocks = entry.pop("block_table")
                if len(blocks) % num_groups:
                    raise TraceError(
                        f"{location}: a block table has {len(blocks)} blocks; expected a multiple of {num_groups}, the "
                        "number of KV-cache groups"
                    )
                entry["block_tables"] = [blocks[group::num_groups] for group in range(num_groups)]
