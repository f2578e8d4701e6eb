"""examples/debug_decode.py under a debugger: at every stop, the named arrays have the right values."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minillm import LLM, Engine, SamplingParams
from minillm.model.debugger import debugger_attached
from minillm.model.kv_cache import KVCache
from minillm.model.probe import no_probe
from minillm.model.transformer import Transformer

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "debug_decode.py"
STAGES = ["schedule", "batch", "forward", "sample", "commit", "record"]
PROMPT = "(Pdb) "


def stop_lines():
    """Line numbers of the marked stops, by stage."""
    lines = enumerate(EXAMPLE.read_text(encoding="utf-8").splitlines(), start=1)
    return {found[1]: number for number, line in lines if (found := re.search(r"# STOP \d, (\w+): ", line))}


def line_of(path, text):
    """Return the number of the one line that contains `text`."""
    (number,) = [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1) if text in line]
    return number


def debug(python_options, commands, *options, script=EXAMPLE):
    """Return pdb's answer to each command. `python_options` precede the script on the command line."""
    command = [sys.executable, *python_options, str(script), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON_COLORS": "0"}
    lines = "\n".join([*commands, "q", "y"])  # some Python versions ask for confirmation
    done = subprocess.run(command, input=lines, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    pieces = done.stdout.split(PROMPT)
    assert len(pieces) > len(commands) + 1, done.stdout + done.stderr
    return [piece.rstrip("\n") for piece in pieces[1 : len(commands) + 1]]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def make_engine(llm, example):
    config = example["CONFIG"]
    cache = KVCache(llm.config, config.num_blocks, config.block_size)
    return Engine(llm.transformer, cache, config.scheduler(cache), tokenizer=llm.tokenizer)


def serve_with_an_engine(llm, example, probe=no_probe):
    """Return the records of an engine that receives the example's requests, and the number of the step walked through.

    The requests arrive at the same steps as in the example. The probe is set during the step walked through.
    """
    engine, prompts, params = make_engine(llm, example), example["PROMPTS"], example["PARAMS"]
    engine.add_request(llm.encode(prompts["short"]), params, request_id="short")
    records = [engine.step()]
    while not records[-1].chunks[0].sampled:
        records.append(engine.step())
    engine.add_request(llm.encode(prompts["long"]), params, request_id="long")
    engine.probe, walked = probe, len(records)
    records.append(engine.step())
    engine.probe = no_probe
    while engine.has_unfinished:
        records.append(engine.step())
    return records, walked


def without_times(record):
    """Return the record without the times of its stages and the arrivals, which the example does not record."""
    return replace(record, time=0.0, milliseconds={}, arrived=[])


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_the_example_does_what_the_engine_does(example, tiny_gguf, backend, capsys):
    """All fields of all records are equal, apart from times and arrivals."""
    llm = LLM(tiny_gguf, backend=backend)
    ours = example["serve"](llm, show=example["print_stage"]).records
    records, walked = serve_with_an_engine(llm, example)
    assert list(map(without_times, ours)) == list(map(without_times, records))
    assert [chunk.phase for chunk in records[walked].chunks] == ["decode", "prefill"]
    assert not records[walked].chunks[1].sampled  # more of that prompt follows
    printed = capsys.readouterr().out
    assert re.findall(r"^--- \d\. (\w+) ---$", printed, flags=re.MULTILINE) == STAGES
    assert repr(ours[walked]) in printed
    assert " at 0x" not in printed  # every object has a repr of its own


def test_pdb_stops_in_every_stage_and_reads_the_arrays(example, tiny_gguf):
    reference = ROOT / "minillm" / "ops" / "reference.py"
    after_softmax = line_of(reference, "return xp.permute_dims(weights @ values, (1, 0, 2))")
    session = {
        "plan": "p plan",
        "chunks": "p [(c.start, c.token_ids, c.block_tables) for c in plan.chunks]",
        1: "c",
        "batch": "p batch",
        "arrays": "p {name: array.tolist() for name, array in vars(batch).items()}",
        "breakpoint": f"tbreak {reference}:{after_softmax}",
        "into attention": "c",
        "weights": "p weights.transpose(1, 0, 2).tolist()",
        2: "c",
        "names": "p list(seen)",
        "layer": "p seen['layers.1.attention.weights'].tolist()",
        "logits": "p logits.tolist()",
        3: "c",
        "tokens": "p [[(t.token_id, t.logprob) for t in row] for row in tokens]",
        4: "c",
        "sampled": "p [[(t.token_id, t.finish_reason) for t in row] for row in tokens]",
        "sequences": "p scheduler.running",
        5: "c",
        "record": "p record",
    }
    options = ("--stop", "--backend", "numpy", "--model", tiny_gguf)
    answers = dict(zip(session, debug([], session.values(), *options), strict=True))

    llm, seen = LLM(tiny_gguf, backend="numpy"), {}
    records, walked = serve_with_an_engine(llm, example, seen.__setitem__)
    record = replace(records[walked], arrived=[])
    chunks = [(c.start, c.token_ids, c.block_tables) for c in record.chunks]
    assert answers["plan"] == "StepPlan(16 tokens: prefill long[0:15]; decode short; admitted long)"
    assert ast.literal_eval(answers["chunks"]) == chunks
    assert answers["batch"] == f"Batch(16 tokens of 2 sequences, positions {chunks[0][0]}, 0..14)"
    arrays = ast.literal_eval(answers["arrays"])
    assert arrays["token_ids"] == [token for _, ids, _ in chunks for token in ids]
    assert arrays["positions"] == [start + n for start, ids, _ in chunks for n in range(len(ids))]
    tables = [table for _, ids, (table,) in chunks for _ in ids]
    assert arrays["slots"] == [[t[p // 8] * 8 + p % 8 for t, p in zip(tables, arrays["positions"], strict=True)]]
    assert "attend()" in answers["into attention"]
    first = seen["layers.0.attention.weights"][:1, :, : chunks[0][0] + 1]  # the first sequence's only token, in layer 0
    np.testing.assert_allclose(ast.literal_eval(answers["weights"]), first, rtol=1e-6)
    assert ast.literal_eval(answers["names"]) == list(seen)
    np.testing.assert_allclose(ast.literal_eval(answers["layer"]), seen["layers.1.attention.weights"], rtol=1e-6)
    np.testing.assert_allclose(ast.literal_eval(answers["logits"]), seen["logits"], rtol=1e-5)
    (token,) = record.chunks[0].sampled
    assert ast.literal_eval(answers["tokens"]) == [[(token.token_id, token.logprob)], []]
    assert ast.literal_eval(answers["sampled"]) == [[(token.token_id, None)], []]
    length, num_blocks = len(llm.encode(example["PROMPTS"]["long"])), len(chunks[1][2][0])
    assert f"long: {length} prompt + 0 generated tokens, 15 computed, {num_blocks} blocks" in answers["sequences"]
    assert answers["record"] == repr(record)


def test_pdb_walks_the_default_model_by_breakpoints(example, default_gguf):
    """Under `python -m pdb`, without --stop: a breakpoint on each marked line, with the compiled backend."""
    lines = stop_lines()
    assert list(lines) == STAGES
    session = {f"break {stage}": f"b {EXAMPLE}:{line}, record.step == 1" for stage, line in lines.items()} | {
        "schedule": "c",
        "batch": "c",
        "tokens": "p batch.token_ids.tolist()",
        "forward": "c",
        "gathered": "p seen['layers.29.attention.gathered'][0, 0].tolist()",
        "sample": "c",
        "best": "p logits.argmax(axis=1).tolist()",
        "commit": "c",
        "record": "c",
        "text": "p record.chunks[0].sampled[0].text",
    }
    answers = dict(zip(session, debug(["-m", "pdb"], session.values(), "--model", default_gguf), strict=True))
    for stage in STAGES:
        assert f"{EXAMPLE}({lines[stage]})walk()" in answers[stage]
    llm, seen = LLM(default_gguf), {}
    records, walked = serve_with_an_engine(llm, example, seen.__setitem__)
    assert ast.literal_eval(answers["tokens"]) == [t for chunk in records[walked].chunks for t in chunk.token_ids]
    gathered = ast.literal_eval(answers["gathered"])
    np.testing.assert_array_equal(np.float32(gathered), seen["layers.29.attention.gathered"][0, 0])  # the same bits
    assert ast.literal_eval(answers["best"]) == seen["logits"].argmax(axis=1).tolist()
    assert answers["text"] == repr(records[walked].chunks[0].sampled[0].text)


SCRIPT = """
import sys
from minillm import LLM, SamplingParams
(answer,) = LLM(sys.argv[1]).generate("ab", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
print(answer.token_ids)
"""


def test_pdb_stops_in_attention_with_the_default_backend(tiny_gguf, tmp_path):
    """With a debugger attached the layers run one by one, and the answer has the same tokens."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    transformer = ROOT / "minillm" / "model" / "transformer.py"
    line = line_of(transformer, "v = self._heads(x, layer.v)")
    session = {
        "break": f"b {transformer}:{line}",
        "first": "c",
        "first layer": "p index",
        "shapes": "p (batch.num_tokens, x.shape, k.shape)",
        "second": "c",
        "second layer": "p index",
        "clear": "cl 1",
        "end": "c",
    }
    answers = dict(zip(session, debug(["-m", "pdb"], session.values(), tiny_gguf, script=script), strict=True))
    for stop in ("first", "second"):
        assert f"{transformer}({line})_attention()" in answers[stop]
    assert [int(answers["first layer"]), int(answers["second layer"])] == [0, 1]
    num_tokens, x_shape, k_shape = ast.literal_eval(answers["shapes"])
    assert (x_shape, k_shape) == ((num_tokens, 64), (num_tokens, 2, 16))
    llm = LLM(tiny_gguf)
    assert llm.transformer.fused_layers
    (answer,) = llm.generate("ab", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert str(answer.token_ids) in answers["end"]


def test_layers_run_one_by_one_on_request_or_under_a_debugger_with_the_same_bits(tiny_gguf, monkeypatch):
    token_ids = [3, 4, 5, 6, 7, 8, 9]
    fused = LLM(tiny_gguf)
    expected = fused.logits(token_ids)
    layers_run = []
    original_layer = Transformer._layer

    def recorded_layer(self, *arguments):
        layers_run.append(arguments[4])
        return original_layer(self, *arguments)

    monkeypatch.setattr(Transformer, "_layer", recorded_layer)
    np.testing.assert_array_equal(fused.logits(token_ids), expected)
    assert layers_run == []
    attached = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        under_a_debugger = fused.logits(token_ids)
    finally:
        sys.settrace(attached)
    np.testing.assert_array_equal(under_a_debugger, expected)
    assert layers_run == [0, 1]
    one_by_one = LLM(tiny_gguf, fused=False)
    layers_run.clear()
    np.testing.assert_array_equal(one_by_one.logits(token_ids), expected)
    assert layers_run == [0, 1]


@pytest.mark.parametrize("tool", [None, "pydevd"])
def test_a_debugger_that_uses_sys_monitoring_is_detected(monkeypatch, tool):
    """Since Python 3.12, debuggers can register a tool instead of setting a trace function."""
    monitoring = SimpleNamespace(DEBUGGER_ID=0, get_tool={0: tool, 1: "coverage"}.get)
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    assert debugger_attached() == (tool is not None)


def test_vs_code_has_a_configuration_for_both_backends():
    text = (ROOT / ".vscode" / "launch.json").read_text(encoding="utf-8")
    configurations = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))["configurations"]
    ours = [c["args"] for c in configurations if c["program"].endswith("/examples/debug_decode.py")]
    assert ours == [["--stop"], ["--stop", "--backend", "numpy"]]
    for configuration in configurations:
        assert (ROOT / configuration["program"].removeprefix("${workspaceFolder}/")).exists()
