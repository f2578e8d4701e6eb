"""The engines that are compared: minillm, and the peers that can do the same work on the same file."""

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
    name : the engine's name in the table
    file : the file that the worker runs
    package : the packages to install
    options : further arguments of the engine's `load`
    gguf_only : whether it cannot read Hugging Face folders
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
class EngineHandle:
    """An engine with a model: the process that has loaded it, and what is needed to start others."""

    spec: EngineSpec
    python: str
    model: Path
    threads: int
    worker: Worker | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # the result of `load`

    @property
    def name(self) -> str:
        """The engine's name in the table."""
        return self.spec.name

    def start(self) -> Worker:
        """Start a new process, in which nothing is loaded."""
        environment = {}
        if self.spec is OURS:  # imported from the same place as here, installed or not
            paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return Worker(self.spec.file, self.python, environment)

    def load(self, worker: Worker) -> dict[str, Any]:
        """Load the model in a process."""
        return worker.call("load", path=str(self.model), threads=self.threads, **self.spec.options)

    def loaded(self) -> Worker:
        """Return the permanent process, with the model loaded. It is started again if it died.

        Raises
        ------
        BenchmarkError
            The process cannot be started, or cannot load the model.
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
        """End the permanent process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def find_engine(spec: EngineSpec, pythons: Sequence[str], model: Path, threads: int) -> EngineHandle:
    """Start and load the engine in the first of `pythons` that has it.

    Raises
    ------
    BenchmarkError
        No interpreter has the engine, or the engine cannot load the model.
    """
    if spec.gguf_only and model.is_dir():
        raise BenchmarkError("reads only .gguf files, but the model is a folder")
    for python in pythons:
        engine = EngineHandle(spec, python, model, threads)
        try:
            engine.loaded()
        except NotInstalled:
            continue
        return engine
    raise _not_installed(spec, pythons)


def stored_as(model: Path, storage: str, pythons: Sequence[str], threads: int) -> Path:
    """Return the path of a copy of the model with matrices stored as `storage`. llama.cpp writes it once.

    Raises
    ------
    RequestError
        `storage` is not one of STORAGES, or the model is a folder.
    BenchmarkError
        llama.cpp is not installed, or cannot write the file.
    """
    if storage not in STORAGES:
        raise RequestError(f"storage type {storage!r} is unknown; it can be {', '.join(STORAGES)}")
    if model.is_dir():
        raise RequestError(f"{model} is a folder; llama.cpp can store only a .gguf file in another type")
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
        f"{spec.name} is not installed in {' or '.join(pythons)}; run: pip install {spec.package}, or pass a Python "
        "that has it as --peer-python"
    )


def pythons_to_try(peer_pythons: Sequence[str]) -> list[str]:
    """Return the given interpreters, then this one."""
    return list(dict.fromkeys([*peer_pythons, sys.executable]))
