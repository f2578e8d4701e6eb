"""Who is compared: minillm, and the engines that can do the same work on the same file."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm import catalog
from minillm.bench.client import NotInstalled, Worker
from minillm.errors import BenchmarkError, RequestError

ENGINES = Path(__file__).parent / "engines"

# Types that llama.cpp writes and minillm reads.
STORAGES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


@dataclass(frozen=True)
class EngineSpec:
    """An engine that can be started.

    Attributes
    ----------
    name : in the table
    file : what the worker runs
    package : what to install to have it
    options : further arguments of its `load`
    gguf_only : it reads no folders
    """

    name: str
    file: Path
    package: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    gguf_only: bool = False


OURS = EngineSpec("minillm", ENGINES / "ours.py")
LLAMA_CPP = EngineSpec("llama.cpp", ENGINES / "llama_cpp.py", "llama-cpp-python", gguf_only=True)
FLOAT32 = EngineSpec(
    "transformers float32", ENGINES / "transformers.py", "torch transformers accelerate gguf", {"dtype": "float32"}
)
BFLOAT16 = EngineSpec("transformers bfloat16", FLOAT32.file, FLOAT32.package, {"dtype": "bfloat16"})
PEERS = (LLAMA_CPP, FLOAT32, BFLOAT16)


@dataclass
class Engine:
    """An engine with a model: the process where it is loaded, and how to start others like it."""

    spec: EngineSpec
    python: str
    model: Path
    threads: int
    worker: Worker | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # what `load` told

    @property
    def name(self) -> str:
        """In the table."""
        return self.spec.name

    def start(self) -> Worker:
        """A fresh process, nothing loaded yet."""
        environment = {}
        if self.spec is OURS:  # found as it was found here, installed or not
            places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        return Worker(self.spec.file, self.python, environment)

    def load(self, worker: Worker) -> dict[str, Any]:
        """Load the model there."""
        return worker.call("load", path=str(self.model), threads=self.threads, **self.spec.options)

    def loaded(self) -> Worker:
        """The process that stays, started (again, if it died) and loaded.

        Raises
        ------
        BenchmarkError
            It cannot be.
        """
        if self.worker is None or not self.worker.is_alive:
            self.close()
            worker = self.start()
            try:
                self.facts = self.load(worker)
            except BaseException:
                worker.close()
                raise
            self.worker = worker
        return self.worker

    def close(self) -> None:
        """End the process that stays."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def find_engine(spec: EngineSpec, pythons: Sequence[str], model: Path, threads: int) -> Engine:
    """The engine, loaded, under the first of `pythons` that has it.

    Raises
    ------
    BenchmarkError
        None has it, or it does not load the model; the message says which.
    """
    if spec.gguf_only and model.is_dir():
        raise BenchmarkError("reads .gguf files only, and the model is a folder")
    for python in pythons:
        engine = Engine(spec, python, model, threads)
        try:
            engine.loaded()
        except NotInstalled:
            continue
        return engine
    raise _not_installed(spec, pythons)


def stored_as(model: Path, storage: str, pythons: Sequence[str], threads: int) -> Path:
    """The model with its matrices stored as `storage`: written by llama.cpp into the cache folder, once.

    Raises
    ------
    RequestError
        `storage` is none of STORAGES, or the model is a folder.
    BenchmarkError
        llama.cpp is not installed, or cannot write it.
    """
    if storage not in STORAGES:
        raise RequestError(f"storage type {storage!r} is unknown; there are {', '.join(STORAGES)}")
    if model.is_dir():
        raise RequestError(f"{model}: a folder; llama.cpp can store only a .gguf file in another type")
    origin = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:8]  # two models may have the same name
    target = catalog.cache_folder() / f"{model.stem}.{origin}.as-{storage}.gguf"
    if target.exists() and target.stat().st_mtime >= model.stat().st_mtime:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.part")
    try:
        with _first_installed(LLAMA_CPP, pythons) as worker:
            worker.call("requantize", source=str(model), target=str(partial), storage=storage, threads=threads)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _first_installed(spec: EngineSpec, pythons: Sequence[str]) -> Worker:
    for python in pythons:
        try:
            return Worker(spec.file, python)
        except NotInstalled:
            continue
    raise _not_installed(spec, pythons)


def _not_installed(spec: EngineSpec, pythons: Sequence[str]) -> BenchmarkError:
    return BenchmarkError(
        f"{spec.name} is not installed for {' or '.join(pythons)}; run: pip install {spec.package}, or name a Python "
        "that has it with --peer-python"
    )


def pythons_to_try(peer_pythons: Sequence[str]) -> list[str]:
    """Those named, then this one."""
    return list(dict.fromkeys([*peer_pythons, sys.executable]))
