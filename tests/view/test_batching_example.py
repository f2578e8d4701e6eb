"""The example `examples/batching.py`: its plain output, its table, and its live view in a pseudo-terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support.builders import random_llama, without_compiler_notice, write_gguf
from support.plain_lines import fields

from minillm.engine.scheduler import POLICIES
from minillm.trace import Trace
from minillm.view import plain_line
from minillm.view.plain import plain_header

EXAMPLE = Path(__file__).parents[2] / "examples" / "batching.py"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_gguf(path, random_llama(vocab_size=262, max_position_embeddings=1024), with_tokenizer=True))


def run_example(model_file, *arguments, **options):
    command = [sys.executable, EXAMPLE, "--model", model_file, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_example_prints_one_line_per_step_and_compares(model_file, policy, tmp_path):
    saved = tmp_path / "trace.jsonl"
    process = run_example(model_file, "--policy", policy, "--save", saved)
    assert (process.returncode, without_compiler_notice(process.stderr)) == (0, "")
    trace = Trace.read(saved)
    assert trace.facts.policy == policy
    lines = process.stdout.splitlines()
    assert lines[: len(trace) + 1] == [plain_header(trace.facts), *map(plain_line, trace)]
    table = lines[len(trace) + 1 :]
    assert [line.split()[0] for line in table if line.split() and line.split()[0] in POLICIES] == list(POLICIES)
    assert "Every answer is the same under every policy, token for token." in table
    names = ["fox", "count", "opens", "dogs", "trains", "colours"]
    assert [arrival.request_id for record in trace for arrival in record.arrived] == names
    assert sorted(finish.request_id for record in trace for finish in record.finished) == sorted(names)
    assert any(record.preempted for record in trace) or policy == "static"
    assert any(count > 1 for record in trace for count in record.pool.references) or policy == "static"


def test_the_table_agrees_with_the_run(model_file):
    process = run_example(model_file, "--fast", "--backend", "numpy")
    assert process.returncode == 0
    (line,) = [line for line in process.stdout.splitlines() if line.split()[:1] == ["chunked"]]
    steps, *times, recomputed, peak = line.split()[1:]
    printed = [fields(line) for line in process.stdout.splitlines() if line.startswith("step=")]
    assert int(steps) == len([step for step in printed if step["tokens"] != ["0"]])
    held, num_blocks = peak.split("/")
    assert int(held) == max(int(step["held"][0]) for step in printed) <= int(num_blocks)
    assert all(float(number) > 0 for number in times)
    assert int(recomputed) >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "greedy"], "invalid choice: 'greedy'"),
        (["--step", "--fast"], "not allowed with argument"),
        (["--step"], "error: single keys can be read only from a POSIX terminal, and standard input is not one"),
        (["--save", "no/such/folder/t.jsonl"], "error: .*no/such/folder"),
        (["--model", "no/such.gguf"], "error: model 'no/such.gguf': no such file"),
        (["--backend", "numpy", "--threads", "2"], "error: threads is 2, but backend 'numpy'"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(model_file, arguments, message):
    process = run_example(model_file, *arguments)
    assert process.returncode == 2
    assert re.search(message, process.stderr)
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


class Terminal:
    """The example in a pseudo-terminal, driven by keys.

    `output` is what it has written since the text that was last waited for.
    """

    def __init__(self, *arguments, size=(24, 80), term="xterm-256color"):
        self.controller, self.terminal = pty.openpty()
        termios.tcsetwinsize(self.terminal, size)
        self.settings, self.output = termios.tcgetattr(self.terminal), ""
        environment = os.environ | {"TERM": term}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, EXAMPLE, *arguments],
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C works
        )

    def press(self, keys):
        os.write(self.controller, keys.encode())

    def wait_for(self, text):
        """Read until `text` has been written. A minute without output is a failure."""
        while text not in self.output:
            assert self._read(60), f"no {text!r} in {self.output[-2000:]!r}"
        self.output = self.output.partition(text)[2]

    def end(self):
        """Wait until it has ended, and return its exit status."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.output[-2000:]!r}"
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def is_restored(self):
        return termios.tcgetattr(self.terminal) == self.settings

    def _read(self, timeout):
        ready, _, _ = select.select([self.controller], [], [], timeout)
        if ready:
            self.output += os.read(self.controller, 65536).decode("utf-8", "replace")
        return bool(ready)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.controller)
        os.close(self.terminal)


@pytest.fixture
def terminal(request, model_file):
    opened = []

    def open_terminal(*arguments, **options):
        opened.append(Terminal("--model", model_file, *arguments, **options))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"  # of the alternate screen


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        (lambda driven: driven.press("q"), 0),
        (lambda driven: driven.press("\x04"), 0),
        (lambda driven: driven.press("\x03"), 130),
        (lambda driven: driven.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda driven: driven.process.send_signal(signal.SIGHUP), 128 + signal.SIGHUP),
    ],
    ids=["q", "Ctrl-D", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_step_by_step(terminal, tmp_path, leave, status):
    saved = tmp_path / "trace.jsonl"
    driven = terminal("--step", "--save", str(saved))
    driven.wait_for(ENTER_SCREEN)
    driven.wait_for("step 0\x1b")
    driven.press("x")  # a key without a meaning
    driven.press(" ")
    driven.wait_for("step 1\x1b")
    driven.press("\r")
    driven.wait_for("step 2\x1b")
    assert not driven.is_restored()  # keys are read one by one, without echo
    leave(driven)
    assert driven.end() == status
    assert driven.is_restored()
    assert LEAVE_SCREEN in driven.output
    assert "\x1b[?25h" in driven.output  # the cursor is visible again
    assert "Traceback" not in driven.output
    assert "step 3\x1b" not in driven.output
    assert "three policies" not in driven.output
    assert len(Trace.read(saved)) == 3  # the steps so far are saved


def test_to_the_end_in_a_terminal(terminal):
    driven = terminal("--fast", size=(40, 120))
    assert driven.end() == 0
    assert driven.is_restored()
    live, _, after = driven.output.partition(LEAVE_SCREEN)
    assert "step 0\x1b" in live
    assert "A fox" in re.sub(r"\x1b\[[^a-zA-Z]*m", "", after)  # the last frame stays
    assert "three policies" in after


def test_a_change_of_size_redraws_the_frame(terminal):
    driven = terminal("--step")
    driven.wait_for("step 0\x1b")
    termios.tcsetwinsize(driven.terminal, (50, 200))
    driven.wait_for("tiny.gguf")  # the model's name fits only now
    driven.press("q")
    assert driven.end() == 0


def test_a_dumb_terminal_gets_plain_lines(terminal):
    driven = terminal("--fast", term="dumb")
    assert driven.end() == 0
    assert driven.output.startswith("run model=")
    assert "\x1b" not in driven.output
    assert "three policies" in driven.output


def test_forced_colours_do_not_draw_frames_into_a_pipe(model_file):
    process = run_example(model_file, "--fast", env=os.environ | {"FORCE_COLOR": "1"})
    assert process.stdout.startswith("run model=")
    assert ENTER_SCREEN not in process.stdout
