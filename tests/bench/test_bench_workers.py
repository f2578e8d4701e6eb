"""Engines in worker processes, and the conversion of a model to another storage type."""

import signal
import sys

import pytest
from support.bench_engines import FAKE_ENGINE, engine_file

from minillm import BenchmarkError, RequestError
from minillm.bench import peers
from minillm.bench.client import NotInstalled, Worker
from minillm.bench.exactness import max_difference
from minillm.bench.peers import EngineSpec, stored_as

PROTOCOL_ENGINE = """
import os, sys, time, signal
class ProtocolEngine:
    def add(self, left, right):
        print("noise on standard output")
        os.write(1, b"noise below Python\\n")
        return left + right
    def fail(self):
        raise ValueError("refused")
    def die(self):
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    def crash(self):
        os.kill(os.getpid(), signal.SIGILL)
    def sleep(self):
        time.sleep(60)

ENGINE = ProtocolEngine
"""


def test_a_worker_survives_errors_and_reports_its_exit(tmp_path):
    with Worker(engine_file(tmp_path, PROTOCOL_ENGINE)) as worker:
        assert worker.call("add", left=[1], right=["é"]) == [1, "é"]
        with pytest.raises(BenchmarkError, match="ValueError: refused"):
            worker.call("fail")
        with pytest.raises(BenchmarkError, match="no attribute 'unknown'"):
            worker.call("unknown")
        assert worker.call("add", left=1, right=2) == 3
        assert worker.call("peak_bytes") > 1e6
        with pytest.raises(BenchmarkError, match="ended with status 7; last line of stderr: last words"):
            worker.call("die")
        assert not worker.is_alive
        with pytest.raises(BenchmarkError, match="status 7"):
            worker.call("add", left=1, right=2)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such signals")
def test_a_worker_that_crashes_names_the_signal(tmp_path):
    """An engine that was built for another processor dies of an illegal instruction."""
    with Worker(engine_file(tmp_path, PROTOCOL_ENGINE)) as worker:
        with pytest.raises(BenchmarkError, match="the engine's process ended by signal SIGILL"):
            worker.call("crash")
        assert not worker.is_alive


def test_a_worker_that_does_not_answer_is_killed(tmp_path):
    with (
        Worker(engine_file(tmp_path, PROTOCOL_ENGINE), timeout=0.5) as worker,
        pytest.raises(BenchmarkError, match="did not answer within"),
    ):
        worker.call("sleep")


def test_workers_that_cannot_start(tmp_path):
    with pytest.raises(NotInstalled, match="no_such_package"):
        Worker(engine_file(tmp_path, "import no_such_package"))
    with pytest.raises(BenchmarkError, match="status 1; last line of stderr: ZeroDivisionError"):
        Worker(engine_file(tmp_path, "1 / 0"))
    with pytest.raises(BenchmarkError, match="cannot be started"):
        Worker(engine_file(tmp_path, PROTOCOL_ENGINE), python=str(tmp_path / "no_python"))


def test_max_difference_is_over_all_prompts(tmp_path):
    shifted = FAKE_ENGINE.replace("SHIFT = 0", "SHIFT = 0.125")
    with (
        Worker(engine_file(tmp_path, FAKE_ENGINE, "a.py")) as oracle,
        Worker(engine_file(tmp_path, shifted, "b.py")) as engine,
    ):
        assert max_difference(oracle, oracle, [[1, 2], [3]]) == 0
        assert max_difference(engine, oracle, [[1, 2], [3]]) == 0.25


def test_a_model_is_converted_to_another_type_once(tmp_path, monkeypatch, tiny_gguf):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "LLAMA_CPP", EngineSpec("fake", engine_file(tmp_path, FAKE_ENGINE), "fake-package"))
    stored = stored_as(tiny_gguf, "F16", [sys.executable], 1)
    assert stored.read_text() == "F16"
    stored.write_text("kept")
    assert stored_as(tiny_gguf, "F16", [sys.executable], 1).read_text() == "kept"
    assert list(stored.parent.iterdir()) == [stored]

    broken = FAKE_ENGINE.replace("write(storage)", "write(storage); 1 / 0")
    monkeypatch.setattr(peers, "LLAMA_CPP", EngineSpec("fake", engine_file(tmp_path, broken, "broken.py")))
    with pytest.raises(BenchmarkError, match="ZeroDivisionError"):
        stored_as(tiny_gguf, "F32", [sys.executable], 1)
    assert list(stored.parent.iterdir()) == [stored]

    with pytest.raises(RequestError, match="'Q9' is unknown"):
        stored_as(tiny_gguf, "Q9", [sys.executable], 1)
    with pytest.raises(RequestError, match="folder"):
        stored_as(tmp_path, "Q8_0", [sys.executable], 1)
