"""Trace: a run's records, as one file of JSON Lines.

The first line says what the file is and what the run had in common; every further line is one step. Whoever reads a
file trusts nothing in it: each value is held against the type its record declares, and steps must follow each other.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache, partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from minillm.errors import TraceError
from minillm.trace.events import DECODE, PREFILL
from minillm.trace.records import STAGES, RunFacts, StepRecord

FORMAT_VERSION = 5
OLDER_VERSIONS = (2, 3, 4)  # read as well; see `_upgrade`
FREED = -1  # in a block table, in place of a freed block (minillm.engine.block_table)
HEADER_KEY = "minillm_trace"  # what the first line has, and its value is the version
MOST = 2**53 - 1  # the largest integer that every reader of JSON holds exactly (RFC 8259, section 6)
DEEPEST = 20  # lists or objects in each other, where a record may say anything


Place = str | tuple[Any, str]  # where in a file: the line, or a place and the name of a field in it
Reader = Callable[[Any, Place], Any]


@dataclass
class Trace:
    """A run: what it had in common, and its steps in order. Iterating gives the steps.

    Attributes
    ----------
    facts : RunFacts
    steps : the records, numbered from the first one's `step` on without a gap.
    """

    facts: RunFacts
    steps: list[StepRecord] = field(default_factory=list)

    def append(self, record: StepRecord) -> None:
        """Add the next step."""
        self.steps.append(record)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def write(self, path: str | os.PathLike) -> None:
        """Write all of it to `path`, in UTF-8: a header line, then a line a step.

        Raises
        ------
        TraceError
            Another kind of file is there, such as the model itself, and would be lost.
        OSError
            It cannot be written.
        """
        _check_may_be_replaced(Path(path))
        with Path(path).open("w", encoding="utf-8") as file:
            for line in self.lines():
                file.write(line + "\n")

    def lines(self) -> Iterator[str]:
        """The lines of the file, without their ends."""
        yield json.dumps({HEADER_KEY: FORMAT_VERSION, "run": asdict(self.facts)})
        for record in self.steps:
            yield json.dumps(to_json(record))

    @classmethod
    def read(cls, path: str | os.PathLike) -> Trace:
        """The trace that `write` wrote to `path`.

        Raises
        ------
        TraceError
            It is no trace, of another version, cut off, or was changed to say something that cannot be; the message
            names the line. A file that was cut off exactly at the end of a line reads as the shorter run it is.
        OSError
            It cannot be read.
        """
        with Path(path).open("rb") as file:
            numbered = enumerate(file, start=1)
            facts, version = _header(next(numbered, (1, b"")), str(path))
            trace = cls(facts)
            for number, line in numbered:
                where = f"{path}: line {number}"
                values = _object(line, where)
                if HEADER_KEY in values:
                    raise TraceError(
                        f"{where} is another header; the file holds two traces, which may differ in version"
                    )
                if version != FORMAT_VERSION:
                    _upgrade(values, facts.num_groups, where)
                record = from_json(StepRecord, values, where)
                _check_step(record, trace, where)
                trace.append(record)
        return trace

    def __repr__(self):
        return f"Trace({len(self)} steps of {self.facts.model}, {self.facts.policy})"


def _check_may_be_replaced(path: Path) -> None:
    if not path.is_file():
        return
    beginning = f'{{"{HEADER_KEY}": '.encode()
    with path.open("rb") as file:
        if not beginning.startswith(file.read(len(beginning))):  # of one that was cut off, less is there
            raise TraceError(f"{path} is there, and is no trace; it would be lost: name another file, or remove it")


def to_json(record: Any) -> dict[str, Any]:
    """A record as JSON has it: an object with a key for every field, but for those that no file keeps."""
    return {
        f.name: _plain(getattr(record, f.name)) for f in fields(record) if f.metadata.get("in_file", True)
    }  # not `asdict`, which would copy exceptions


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type, value: Any, where: str) -> Any:
    """The record of type `kind` that `value` describes.

    Raises
    ------
    TraceError
        A field is missing, unknown, or not of the type that `kind` declares.
    """
    return _reader(kind)(value, where)


@cache
def _reader(kind: Any) -> Reader:
    """What turns a JSON value into a `kind`, made once a type."""
    if isinstance(kind, type) and is_dataclass(kind):
        return _record_reader(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return _list_reader(arguments[0])
    if origin is dict:
        return _dict_reader(_reader(arguments[1]))
    if origin is types.UnionType:
        (inner,) = [_reader(argument) for argument in arguments if argument is not type(None)]
        return lambda value, where: None if value is None else inner(value, where)
    if kind is Any:
        return _read_anything
    return _plain_reader(kind)


def _read_anything(value: Any, where: Place) -> Any:
    """Whatever JSON can say, but not so deep in itself that those who go through it by recursion cannot."""
    inside = [value]
    for _ in range(DEEPEST):
        inside = [item for each in inside for item in _items(each)]
    if inside:
        raise TraceError(f"{_said(where)} has lists or objects in each other more than {DEEPEST} deep")
    return value


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _plain_reader(kind: type) -> Reader:
    wanted = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}[kind]

    def read(value: Any, where: Place) -> Any:
        is_kind = type(value) is kind or (kind is float and type(value) is int)  # not isinstance: True is no integer
        if not is_kind or (kind is float and not abs(value) <= sys.float_info.max):
            raise TraceError(f"{_said(where)} is {value!r:.40}; wanted {wanted}")
        if kind is int and not -MOST <= value <= MOST:
            raise TraceError(
                f"{_said(where)} is {value!r:.40}; wanted an integer of at most 2^53 - 1, which others can read"
            )
        return kind(value)

    return read


def _list_reader(kind: Any) -> Reader:
    read_item = _reader(kind)

    def read(value: Any, where: Place) -> Any:
        if not isinstance(value, list):
            raise TraceError(f"{_said(where)} is {value!r:.40}; wanted a list")
        if kind is int and value and set(map(type, value)) == {int} and min(value) >= -MOST and max(value) <= MOST:
            return value  # block tables are most of a file: checked in one go
        return [read_item(item, where) for item in value]

    return read


def _dict_reader(read_item: Reader) -> Reader:
    def read(value: Any, where: Place) -> Any:
        if not isinstance(value, dict):
            raise TraceError(f"{_said(where)} is {value!r:.40}; wanted an object")
        return {key: read_item(item, (where, key)) for key, item in value.items()}

    return read


def _record_reader(kind: type) -> Reader:
    hints = typing.get_type_hints(kind)
    readers = {f.name: _reader(hints[f.name]) for f in fields(kind) if f.metadata.get("in_file", True)}

    def read(value: Any, where: Place) -> Any:
        if not isinstance(value, dict):
            raise TraceError(f"{_said(where)} is {value!r:.40}; wanted an object with {', '.join(readers)}")
        if value.keys() != readers.keys():
            missing, unknown = sorted(readers.keys() - value.keys()), sorted(value.keys() - readers.keys())
            raise TraceError(f"{_said(where)}: a {kind.__name__} lacks fields {missing} and has unknown ones {unknown}")
        return kind(*[reader(value[name], (where, name)) for name, reader in readers.items()])

    return read


def _said(where: Place) -> str:
    """A place in words. It is only put together when there is something to say of it: a file has millions."""
    return where if isinstance(where, str) else f"{_said(where[0])}, {where[1]}"


def _object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object that a line holds."""
    if not line.endswith(b"\n"):
        raise TraceError(f"{where} has no end; the file was cut off, so that its last {len(line)} bytes are no step")
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"{where} holds a JSON {type(value).__name__}; wanted an object")
    return value


def _upgrade(step: dict[str, Any], num_groups: int, where: str) -> None:
    """Change a step of versions 2 to 4 in place: each `block_table` becomes `block_tables`, one per KV-cache group.

    Up to version 4, a single list held the blocks of all groups side by side: block 0 of each group, then block 1, ...
    """
    for name in ("chunks", "running"):
        entries = step.get(name)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("block_table"), list):
                blocks = entry.pop("block_table")
                if len(blocks) % num_groups:
                    raise TraceError(
                        f"{where}: a block table has {len(blocks)} blocks; expected a multiple of {num_groups}, the "
                        "number of KV-cache groups"
                    )
                entry["block_tables"] = [blocks[group::num_groups] for group in range(num_groups)]


def _header(numbered_line: tuple[int, bytes], path: str) -> tuple[RunFacts, int]:
    """The run's facts and the format version, from the first line."""
    number, line = numbered_line
    if not line:
        raise TraceError(f"{path}: line 1 is missing: the file is empty; a trace begins with a header line")
    where = f"{path}: line {number}"
    header = _object(line, where)
    if HEADER_KEY not in header:
        raise TraceError(f"{where} is no trace's header, which has a key {HEADER_KEY!r}; is this another kind of file?")
    version = header[HEADER_KEY]
    if type(version) is not int or version not in (FORMAT_VERSION, *OLDER_VERSIONS):
        raise TraceError(
            f"{where}: a trace of version {version!r}, but this minillm reads versions {OLDER_VERSIONS[0]} to "
            f"{FORMAT_VERSION}: record it again"
        )
    run = header.get("run")
    if version in (2, 3) and isinstance(run, dict):
        run = {**run, "windows": [None]}  # these versions have a single group
    facts = from_json(RunFacts, run, f"{where}, run")
    if not facts.windows or any(window is not None and window < 1 for window in facts.windows):
        raise TraceError(f"{where}, run, windows is {facts.windows}; wanted one for each group of layers, 1 or more")
    for name in ("block_size", "num_blocks", "max_batch_tokens", "max_sequences"):
        if getattr(facts, name) < 1:
            raise TraceError(f"{where}, run, {name} is {getattr(facts, name)}; wanted 1 or more")
    for name, cost in vars(facts.costs).items() if facts.costs else ():
        if cost < 0:
            raise TraceError(f"{where}, run, costs, {name} is {cost}; wanted 0 or more")
    return facts, version


def _check_step(record: StepRecord, trace: Trace, where: str) -> None:
    """What the types cannot say: that the step goes on from the one before, in the pool that the header describes."""
    check = partial(_check, where)
    if trace.steps:
        before = trace.steps[-1]
        check(record.step == before.step + 1, f"step {record.step} follows step {before.step}")
        check(record.time >= before.time, f"time {record.time} comes after {before.time}, of the step before")
    check(record.time >= 0, f"time {record.time} is before the engine was made")
    for arrival in record.arrived:
        said = f"request {arrival.request_id!r} arrived at {arrival.time}"
        check(arrival.time >= 0, f"{said}, before the engine was made")
        check(arrival.time <= record.time, f"{said}, after the step began at {record.time}")
    check(min(record.milliseconds.values(), default=0) >= 0, f"a stage took {record.milliseconds}")
    check(isfinite(record.end), f"time {record.time} and milliseconds {record.milliseconds} come to no number")
    _check_blocks(record, trace.facts, check)
    waiting = len(record.waiting)
    check(record.num_waiting >= waiting, f"{waiting} wait by name, but only {record.num_waiting} in all")
    stages = set(record.milliseconds)
    check(stages == set(STAGES), f"milliseconds are of {sorted(stages)}; wanted {', '.join(STAGES)}")
    for chunk in record.chunks:
        check(chunk.phase in (PREFILL, DECODE), f"phase is {chunk.phase!r}; wanted {PREFILL!r} or {DECODE!r}")
        check(chunk.start >= 0, f"a chunk starts at position {chunk.start}")
        check(chunk.num_tokens > 0, f"the chunk of request {chunk.request_id!r} is empty")


def _check_blocks(record: StepRecord, facts: RunFacts, check: Callable[[bool, str], None]) -> None:
    """That blocks are those of the pool, and that it counts them as the tables of those who run name them."""
    pool, num_blocks, groups = record.pool, facts.num_blocks, facts.num_groups
    check(pool.num_blocks == num_blocks, f"{pool.num_blocks} blocks, but the header has {num_blocks}")
    named_by_chunks = [_live(chunk.block_tables, groups, check) for chunk in record.chunks]
    tables = [_live(sequence.block_tables, groups, check) for sequence in record.running]
    held_blocks = set().union(*tables)
    copied = [block for copy in pool.copies for block in (copy.source, copy.target)]
    named = [held_blocks, *named_by_chunks, pool.cached, pool.evicted, copied]
    named = [*filter(None, named), [0]]
    lowest, highest = min(map(min, named)), max(map(max, named))
    fits = lowest >= 0 and highest < num_blocks
    check(fits, f"blocks are 0 to {num_blocks - 1}, but it names {highest if lowest >= 0 else lowest}")
    check(min(pool.references) >= 0, "a block is named by fewer than no tables")
    are_held = len(held_blocks) == pool.num_held and all(map(pool.references.__getitem__, held_blocks))
    if not are_held or sum(map(len, tables)) != sum(pool.references):  # counting every block would take longer
        counts = Counter(chain.from_iterable(tables))
        block = next(block for block in range(num_blocks) if counts[block] != pool.references[block])
        check(False, f"block {block} has {pool.references[block]} references, but {counts[block]} tables name it")
    check(not any(pool.references[block] for block in pool.cached), "a cached block is held as well")


def _live(block_tables: list[list[int]], num_groups: int, check: Callable[[bool, str], None]) -> list[int]:
    """The live blocks of a sequence in all groups. Freed blocks can only precede the live ones of their table."""
    check(len(block_tables) == num_groups, f"{len(block_tables)} block tables, but {num_groups} KV-cache groups")
    lengths = sorted({len(table) for table in block_tables})
    check(len(lengths) == 1, f"the block tables of a sequence have different lengths: {lengths}")
    live: list[int] = []
    for table in block_tables:
        num_freed = table.count(FREED)
        if table[:num_freed].count(FREED) != num_freed:
            block = next(block for block in table if block != FREED)
            check(False, f"a block table lists block {block} before a freed one ({FREED}); freed blocks come first")
        live += table[num_freed:]
    return live


def _check(where: str, holds: bool, message: str) -> None:
    if not holds:
        raise TraceError(f"{where}: {message}")
