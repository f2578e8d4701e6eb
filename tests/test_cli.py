"""The command line and the examples, as somebody types them."""

import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.builders import random_llama, without_compiler_notice, write_gguf

from minillm import LLM, SamplingParams, cli

EXAMPLES = Path(__file__).parent.parent / "examples"
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(vocab_size=262, max_position_embeddings=400)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    edit = lambda writer: writer.add_chat_template(TEMPLATE)  # noqa: E731
    return str(write_gguf(path, model, with_tokenizer=True, edit=edit))


@pytest.fixture(scope="module")
def llm(model_file):
    return LLM(model_file)


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SUMMARY = (
    r"prefill +\d+ tokens +[\d.]+ ms +[\d.]+ tokens/s.*\n"
    r"decode +4 tokens +[\d.]+ ms +[\d.]+ tokens/s\n"
    r"first token after +[\d.]+ ms\n"
    r"KV cache +[\d.]+ MB held\n"
)
FIVE = SamplingParams(max_tokens=5, temperature=0)


def answer(llm, prompt):
    """Five greedy tokens; the tests use a prompt that does not make the model end before."""
    output = llm.generate([prompt], FIVE)[0]
    assert len(output.token_ids) == 5
    return output.text


@pytest.mark.parametrize("script", ["generate.py", "minillm"])
def test_generate_prints_the_answer_and_what_it_took(script, llm, model_file):
    command = [EXAMPLES / script] if script == "generate.py" else ["-m", "minillm.cli", "generate"]
    command = [sys.executable, *command, "hello", "--model", model_file, "--max-tokens", "5"]
    for form in ("--chat", "--raw"):
        prompt = llm.encode_chat([{"role": "user", "content": "hello"}]) if form == "--chat" else "hello"
        shown = ("hello" if form == "--raw" else "") + answer(llm, prompt)
        process = subprocess.run([*command, form], capture_output=True, encoding="utf-8", check=True)
        assert re.fullmatch(re.escape(shown) + r"\n+" + SUMMARY, process.stdout), process.stdout
        assert without_compiler_notice(process.stderr) == ""
        assert "\x1b" not in process.stdout  # plain text where no terminal is


def test_every_sampling_option_reaches_the_request(monkeypatch, llm, model_file, capsys):
    seen = []
    deltas = list(llm.stream("hello", FIVE))
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params: seen.append(params) or iter(deltas))
    options = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "seed": 9,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert (
        cli.main(["generate", "hello", "--model", model_file, "--threads", "1", "--backend", "numba", *arguments]) == 0
    )
    monkeypatch.setattr(sys, "argv", ["generate.py", "hello", "--model", model_file, *arguments])
    example("generate").main()
    assert seen == [SamplingParams(**options)] * 2


def test_chat_takes_turns(monkeypatch, model_file, capsys):
    talk = "hello\n\n/clear\nhello\nand?\n/exit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(talk))
    assert cli.main(["chat", "--model", model_file, "--max-tokens", "5", "--stats"]) == 0
    printed = capsys.readouterr()
    prefills = re.findall(r"prefill +(\d+) tokens.*?(?:\((\d+) more were cached\))?\n", printed.out)
    (_, none), (again, all_but_one), (new, kept) = prefills
    assert none == ""
    assert 1 <= int(again) <= 16  # after /clear the same message: all but its last block was still there
    assert int(kept) >= int(all_but_one) >= 16  # the conversation so far was in the cache, in whole blocks
    assert int(new) < 60
    assert printed.err == ""


def test_a_system_message_opens_every_conversation(monkeypatch, model_file, capsys):
    seen = []
    stream_chat = LLM.stream_chat

    def recorded(self, messages, params):
        seen.append([dict(message) for message in messages])
        return stream_chat(self, messages, params)

    monkeypatch.setattr(LLM, "stream_chat", recorded)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n/clear\ntwo\n"))
    assert cli.main(["chat", "--model", model_file, "--max-tokens", "2", "--system", "Be brief."]) == 0
    system = {"role": "system", "content": "Be brief."}
    assert seen == [[system, {"role": "user", "content": text}] for text in ("one", "two")]


def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(monkeypatch, model_file, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 500 + "\nhello\n"))
    assert cli.main(["chat", "--model", model_file, "--max-tokens", "5"]) == 0
    printed = capsys.readouterr()
    assert "need a context of 520 tokens, but it has 400" in printed.err
    assert "/clear" in printed.err
    assert printed.out.count("\n") == 1  # the second message was answered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such.gguf"], "error: model 'no/such.gguf': no such file"),
        (["--top-p", "2"], "error: top_p is 2.0; it must be a finite number, over 0, at most 1"),
        (["--temperature", "nan"], "error: temperature is nan"),
        (["--threads", "0"], "error: threads is 0; it must be a whole number, 1 or more"),
        (["--max-tokens", "401"], r"error: a prompt of \d+ tokens and max_tokens of 401 need a context of 422 tokens"),
        (["--backend", "numpy", "--threads", "2"], "error: threads is 2, but backend 'numpy'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(model_file, capsys, arguments, message):
    assert cli.main(["generate", "hello", "--model", model_file, *arguments]) == 2
    printed = capsys.readouterr()
    assert re.match(message, printed.err)
    assert "Traceback" not in printed.err


def test_a_reader_who_has_had_enough(model_file):
    command = (
        f"'{sys.executable}' -m minillm.cli generate hello --raw --model '{model_file}' --max-tokens 300 | head -c 1"
    )
    process = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8", check=True)
    assert process.stdout == "h"
    assert without_compiler_notice(process.stderr) == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "> /dev/full"])
@pytest.mark.parametrize("command", ["generate hello --raw", "chat"])
def test_streams_that_are_closed_or_full_are_no_traceback(model_file, command, closed):
    if "/dev/full" in closed and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    line = f"echo hello | '{sys.executable}' -m minillm.cli {command} --model '{model_file}' --max-tokens 5 {closed}"
    process = subprocess.run(["bash", "-c", line], capture_output=True, encoding="utf-8")
    assert "Traceback" not in process.stderr
    assert "Exception" not in process.stderr
    assert (process.returncode, without_compiler_notice(process.stderr) != "") == (
        (2, True) if "full" in closed else (0, False)
    )


def test_ctrl_c_stops_an_answer_not_the_conversation(monkeypatch, model_file, capsys):
    stream_chat, asked = LLM.stream_chat, []

    def interrupted(self, messages, params):
        asked.append([message["content"] for message in messages])
        deltas = stream_chat(self, messages, params)
        yield next(deltas)
        if len(asked) == 1:
            raise KeyboardInterrupt
        yield from deltas

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand?\n"))
    assert cli.main(["chat", "--model", model_file, "--max-tokens", "5"]) == 0
    _, second = asked
    assert second == ["hello", second[1], "and?"]  # the interrupted answer is kept
    assert capsys.readouterr().out.count("\n") == 2


def test_a_line_that_is_no_text_does_not_end_the_conversation(model_file):
    command = [sys.executable, "-m", "minillm.cli", "chat", "--model", model_file, "--max-tokens", "2"]
    process = subprocess.run(command, input=b"\xff\xfe\nhello\n", capture_output=True, check=True)
    assert b"Traceback" not in process.stderr
    assert process.stdout.count(b"\n") >= 1


def test_an_interrupt_is_no_traceback(monkeypatch, model_file, capsys):
    def interrupted(self, prompt, params):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert cli.main(["generate", "hello", "--model", model_file]) == 130
    assert capsys.readouterr().err == "\n"


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_compare_with_pytorch_finds_every_intermediate_close(model, model_file, backend):
    compare = example("compare_with_pytorch")
    ours = compare.load_transformers(Path(model_file))
    torch.testing.assert_close(ours.get_parameter("lm_head.weight"), model.get_parameter("lm_head.weight"))
    llm = LLM(model_file, backend=backend)
    differences = compare.compare(llm, ours, llm.encode("hello, hello!"))
    assert len(differences) == 1 + 2 * len(compare.LAYER_RESULTS) + 2
    assert max(differences.values()) <= 2e-5
    assert min(differences.values()) >= 0
    scores = {
        f"layers.{index}.attention.scores" for index in range(llm.config.num_layers)
    }  # which PyTorch keeps nowhere
    assert set(llm.probe([1, 2])) == set(differences) | scores
    assert compare.difference_table(differences).row_count == 2
