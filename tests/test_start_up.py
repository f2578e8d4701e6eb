"""Starting a process: kernels are compiled once, with a message; a debugger stops inside the arithmetic."""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders import random_llama, write_gguf

from minillm.ops import reference

ROOT = Path(__file__).parent.parent
kernels = importlib.import_module("minillm.ops.jit.attention")  # the package has a function of that name


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, random_llama(vocab_size=262), "Q4_1", with_tokenizer=True)


def run(*command, text="", **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        input=text,
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env=os.environ | environment,
        timeout=300,
        check=True,
    )


USE_EVERYTHING = """
import sys
from numba.core import event
from minillm import LLM, SamplingParams

class Listener(event.Listener):
    compilations = 0
    def on_start(self, compilation):
        self.compilations += 1
    def on_end(self, compilation):
        pass

listener = Listener()
with event.install_listener("numba:compile", listener):
    llm = LLM(sys.argv[1])
    while_loading = listener.compilations
    llm.generate(["h", "hello hello", [1] * 40], SamplingParams(max_tokens=5, ignore_eos=True))
    llm.logits([1, 2, 3])
    list(llm.stream("hello"  , SamplingParams(max_tokens=3, temperature=1, repetition_penalty=2.0)))
print(while_loading, listener.compilations - while_loading)
"""


@pytest.fixture(scope="module")
def first_run(model_file, tmp_path_factory):
    """A process that has used everything with an empty cache of kernels, and the folder of this cache."""
    folder = tmp_path_factory.mktemp("first_run")
    script = folder / "use_everything.py"
    script.write_text(USE_EVERYTHING, encoding="utf-8")
    return run(script, model_file, NUMBA_CACHE_DIR=str(folder / "kernels")), folder


def test_kernels_are_compiled_once_and_before_the_first_request(model_file, first_run):
    first, folder = first_run
    second = run(folder / "use_everything.py", model_file, NUMBA_CACHE_DIR=str(folder / "kernels"))
    while_loading, later = map(int, first.stdout.split())
    assert while_loading > 0
    assert later == 0
    assert second.stdout.split() == ["0", "0"]
    assert first.stderr.count("compiling the kernels for this machine") == 1
    assert second.stderr == ""


ONE_KERNEL = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from minillm.ops import jit
jit.rms_norm(np.ones((1, 2), np.float32), np.ones(2, np.float32), 1e-5)
print(jit.__file__, sum(jit.rms_norm.stats.cache_hits.values()))
"""


def test_a_kernel_is_compiled_again_when_a_file_that_it_may_call_into_changes(tmp_path):
    shutil.copytree(ROOT / "minillm", tmp_path / "minillm", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "one_kernel.py"
    script.write_text(ONE_KERNEL, encoding="utf-8")

    def hits():
        file, count = run(script, tmp_path).stdout.rsplit(maxsplit=1)
        assert file.startswith(str(tmp_path))
        return int(count)

    assert [hits(), hits()] == [0, 1]
    with open(tmp_path / "minillm" / "ops" / "jit" / "tiles.py", "a", encoding="utf-8") as other_file:
        other_file.write("# changed\n")
    assert [hits(), hits()] == [0, 1]


ONE_KERNEL_IN_ANOTHER = """
import sys
import numpy as np
from numba import prange
from minillm.ops.jit.compiling import compiled, compiled_parallel

@compiled_parallel
def inner(x):
    for i in prange(len(x)):
        x[i] += 1

@compiled
def outer(x):
    inner(x)
    return x.sum()

print({"inner": inner, "outer": outer}[sys.argv[1]](np.zeros(8)))
"""


def test_kernels_compiled_in_different_processes_find_the_threads(tmp_path):
    """The outer kernel is compiled with an inner one from the cache, and then comes from the cache itself."""
    script = tmp_path / "one_in_another.py"
    script.write_text(ONE_KERNEL_IN_ANOTHER, encoding="utf-8")
    outputs = [run(script, name, NUMBA_CACHE_DIR=str(tmp_path)).stdout.strip() for name in ("inner", "outer", "outer")]
    assert outputs == ["None", "8.0", "8.0"]


ANSWER_TWICE = """
import sys, warnings
import numba
from minillm import LLM, SamplingParams, SlowThreadsWarning
llm = LLM(sys.argv[1])
for _ in range(2):
    print(numba.threading_layer(), llm.generate([1, 2, 3], SamplingParams(max_tokens=8, logprobs=True, seed=1))[0])
warnings.simplefilter("error", SlowThreadsWarning)
try:
    LLM(sys.argv[1])
except SlowThreadsWarning as warning:
    print("refused:", warning)
"""


def test_slow_threads_cause_one_warning_per_model_and_give_the_same_bits(model_file, first_run, tmp_path):
    script = tmp_path / "answer_twice.py"
    script.write_text(ANSWER_TWICE, encoding="utf-8")
    kernels = str(first_run[1] / "kernels")  # compiled already
    slow = run(script, model_file, NUMBA_CACHE_DIR=kernels, NUMBA_THREADING_LAYER="workqueue")
    fast = run(script, model_file, NUMBA_CACHE_DIR=kernels)
    assert slow.stderr.count("SlowThreadsWarning: ") == 1
    assert slow.stderr.startswith(f"{script}:5: ")  # the line that makes the model
    assert "SlowThreadsWarning" not in fast.stderr

    def answers(process):
        return [line.split(maxsplit=1)[1].split("metrics=")[0] for line in process.stdout.splitlines()[:2]]

    assert slow.stdout.startswith("workqueue RequestOutput(")
    assert not fast.stdout.startswith("workqueue")
    assert answers(slow) == answers(fast)
    assert "refused: Numba found neither OpenMP nor TBB" in slow.stdout
    assert "refused" not in fast.stdout


def line_of(function, text):
    """Return the line number, in its file, of the function's first line that contains `text`."""
    lines, first = inspect.getsourcelines(getattr(function, "py_func", function))
    return first + next(number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("environment", "options", "stop", "shape"),
    [  # the first pass is the warm-up: two tokens, four heads; compiled attention reads 256 keys at a time
        ({}, ["--backend", "numpy"], (reference.score, "return xp.where"), (4, 2, 2)),
        ({"NUMBA_DISABLE_JIT": "1"}, [], (kernels._softmax_partial, "top = largest"), (4, 256)),
    ],
    ids=["numpy", "jit off"],
)
def test_a_debugger_stops_inside_attention(model_file, environment, options, stop, shape):
    function, text = stop
    breakpoint_ = f"{inspect.getsourcefile(getattr(function, 'py_func', function))}:{line_of(function, text)}"
    commands = [f"b {breakpoint_}", "c", "p 'stopped in', __name__", "p 'scores.shape is', scores.shape", "w", "q"]
    arguments = ["examples/generate.py", "--model", model_file, "--raw", "hello", "--max-tokens", "2", *options]
    output = run("-m", "pdb", *arguments, text="\n".join(commands) + "\n", **environment).stdout
    assert f"('stopped in', '{function.__module__}')" in output
    assert f"('scores.shape is', {shape})" in output
    for file in ("llm.py", "transformer.py"):  # `w` prints the stack
        assert file in output


def test_without_the_compiler_the_answer_is_the_same(model_file, first_run):
    arguments = ["examples/generate.py", "--model", model_file, "--raw", "hello", "--max-tokens", "6"]
    compiled = run(*arguments, NUMBA_CACHE_DIR=str(first_run[1] / "kernels"))
    interpreted = run(*arguments, NUMBA_DISABLE_JIT="1")
    assert interpreted.stdout.splitlines()[0] == compiled.stdout.splitlines()[0]
    assert interpreted.stderr == ""


def test_without_the_compiler_the_default_model_answers(default_gguf):
    """Loops over all weights would take minutes; the time limit of `run` is far above the few seconds that it takes."""
    arguments = ["examples/generate.py", "--raw", "Once upon a time", "--max-tokens", "2"]
    interpreted = run(*arguments, NUMBA_DISABLE_JIT="1").stdout.splitlines()[0]
    assert interpreted == run(*arguments, "--backend", "numpy").stdout.splitlines()[0] != "Once upon a time"


INTERPRETED = """
import itertools
import numpy as np
from minillm.ops import jit
from minillm.quantization import QuantizedMatrix, QuantizedScales

rng = np.random.default_rng(0)
x = rng.standard_normal((1, 64), np.float32)

def scales(in_parts):
    if not in_parts:
        return rng.standard_normal((3, 2), np.float32)
    parts = rng.integers(-128, 128, (3, 2)).astype(np.int8)
    return QuantizedScales(parts, rng.standard_normal((3, 1), np.float32) / 128)

for bits, with_minimum, in_parts in itertools.product((4, 5, 6, 8), (False, True), (False, True)):
    least = 0 if with_minimum and bits < 8 else -(2 ** (bits - 1))
    codes = rng.integers(least, least + 2**bits, (3, 2, 32)).astype(np.int8)
    make = QuantizedMatrix.from_quantized_scales if in_parts else QuantizedMatrix
    matrix = make(codes, scales(in_parts), scales(in_parts) if with_minimum else None, bits=bits)
    kept, weights = jit.as_matrix(matrix), matrix.dequantize()
    np.testing.assert_allclose(jit.embed(np.arange(3, dtype=np.int32), kept), weights, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jit.linear(x, kept, None), x @ weights.T, rtol=1e-5, atol=1e-3)
"""


def test_without_the_compiler_every_weight_format_can_be_read(tmp_path):
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED, encoding="utf-8")
    assert run("-W", "error", script, NUMBA_DISABLE_JIT="1", PYTHONPATH=str(ROOT)).stderr == ""
