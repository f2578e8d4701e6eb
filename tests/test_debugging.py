"""examples/debug_decode.py, walked through by a debugger: at every stop the named arrays are what they should be."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.builders import random_llama, write_gguf

from minillm import LLM, Engine, SamplingParams, trace
from minillm.model.debugger import debugger_attached
from minillm.model.kv_cache import KVCache
from minillm.model.probe import no_probe
from minillm.model.transformer import Transformer

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "debug_decode.py"
STAGES = ["schedule", "batch", "forward", "sample", "commit", "record"]
PROMPT = "(Pdb) "


def stops():
    """Line numbers of the marked places, by stage."""
    marks = enumerate(EXAMPLE.read_text(encoding="utf-8").splitlines(), start=1)
    return {found[1]: number for number, line in marks if (found := re.search(r"# STOP \d, (\w+): ", line))}


def line_of(path, text):
    """The number of the one line that holds `text`."""
    (number,) = [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1) if text in line]
    return number


def debug(before, commands, *options):
    """What pdb answered to each command, Python having been started with `before` in front of the script."""
    command = [sys.executable, *before, str(EXAMPLE), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    lines = "\n".join([*commands, "q", "y"])  # the last for Pythons that ask whether one is sure
    done = subprocess.run(command, input=lines, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    pieces = done.stdout.split(PROMPT)
    assert len(pieces) > len(commands) + 1, done.stdout + done.stderr
    return [piece.rstrip("\n") for piece in pieces[1 : len(commands) + 1]]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("debugging") / "model.gguf"
    return write_gguf(path, random_llama(), "Q8_0", with_tokenizer=True)


def engine_of(llm, example):
    config = example["CONFIG"]
    cache = KVCache(llm.config, config.num_blocks, config.block_size)
    return Engine(llm.transformer, cache, config.scheduler(cache), tokenizer=llm.tokenizer)


def served_by_an_engine(llm, example, probe=no_probe):
    """The records of an engine that is given the example's requests at the same times; and which step is walked."""
    engine, prompts, params = engine_of(llm, example), example["PROMPTS"], example["PARAMS"]
    engine.add_request(llm.encode(prompts["decoding"]), params, request_id="decoding")
    records = [engine.step()]
    while not records[-1].chunks[0].sampled:
        records.append(engine.step())
    engine.add_request(llm.encode(prompts["reading"]), params, request_id="reading")
    engine.probe, walked = probe, len(records)
    records.append(engine.step())
    engine.probe = no_probe
    while engine.has_unfinished:
        records.append(engine.step())
    return records, walked


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_the_spine_in_the_open_does_what_the_engine_does(example, tiny, backend, capsys):
    """To the last field of every record, but for times and who came when: it cannot drift."""
    llm = LLM(tiny, backend=backend)
    ours = example["serve"](llm, say=example["tell"]).records
    records, walked = served_by_an_engine(llm, example)
    no_time = dict.fromkeys(trace.STAGES, 0.0)
    assert ours == [replace(record, time=0.0, milliseconds=no_time, arrived=[]) for record in records]
    assert [chunk.phase for chunk in records[walked].chunks] == ["decode", "prefill"]
    assert not records[walked].chunks[1].sampled  # there is more of that prompt to come
    printed = capsys.readouterr().out
    assert re.findall(r"^--- \d\. (\w+) ---$", printed, flags=re.MULTILINE) == STAGES
    assert repr(ours[walked]) in printed
    assert " at 0x" not in printed  # everything has something of its own to say


def test_pdb_stops_in_every_stage_and_reads_the_arrays(example, tiny):
    attending = ROOT / "minillm" / "ops" / "reference.py"
    into = line_of(attending, "return xp.permute_dims(weights @ values, (1, 0, 2))")
    session = {
        "plan": "p plan",
        "chunks": "p [(c.start, c.token_ids, c.block_tables) for c in plan.chunks]",
        1: "c",
        "batch": "p batch",
        "arrays": "p {name: array.tolist() for name, array in vars(batch).items()}",
        "there": f"tbreak {attending}:{into}",
        "into attention": "c",
        "weights": "p weights.transpose(1, 0, 2).tolist()",
        2: "c",
        "names": "p list(seen)",
        "layer": "p seen['layers.1.attention.weights'].tolist()",
        "logits": "p logits.tolist()",
        3: "c",
        "tokens": "p tokens",
        4: "c",
        "sequences": "p scheduler.running",
        5: "c",
        "record": "p record",
    }
    options = ("--stop", "--backend", "numpy", "--model", tiny)
    said = dict(zip(session, debug([], session.values(), *options), strict=True))

    llm, seen = LLM(tiny, backend="numpy"), {}
    records, walked = served_by_an_engine(llm, example, seen.__setitem__)
    record = replace(records[walked], arrived=[])
    chunks = [(c.start, c.token_ids, c.block_tables) for c in record.chunks]
    assert said["plan"] == "StepPlan(16 tokens: prefill reading[0:15]; decode decoding; admitted reading)"
    assert ast.literal_eval(said["chunks"]) == chunks
    assert said["batch"] == f"Batch(16 tokens of 2 sequences, positions {chunks[0][0]}, 0..14)"
    arrays = ast.literal_eval(said["arrays"])
    assert arrays["token_ids"] == [token for _, ids, _ in chunks for token in ids]
    assert arrays["positions"] == [start + n for start, ids, _ in chunks for n in range(len(ids))]
    tables = [chunks[0][2][0]] * len(chunks[0][1]) + [chunks[1][2][0]] * len(chunks[1][1])
    assert arrays["slots"] == [[t[p // 8] * 8 + p % 8 for t, p in zip(tables, arrays["positions"], strict=True)]]
    assert "attend()" in said["into attention"]
    first = seen["layers.0.attention.weights"][
        :1, :, : chunks[0][0] + 1
    ]  # the first sequence of the batch: one token, in layer 0
    np.testing.assert_allclose(ast.literal_eval(said["weights"]), first, rtol=1e-6)
    assert ast.literal_eval(said["names"]) == list(seen)
    np.testing.assert_allclose(ast.literal_eval(said["layer"]), seen["layers.1.attention.weights"], rtol=1e-6)
    np.testing.assert_allclose(ast.literal_eval(said["logits"]), seen["logits"], rtol=1e-5)
    (token,) = record.chunks[0].sampled
    assert said["tokens"].startswith(f"[[SampledToken(token_id={token.token_id}, logprob={token.logprob!r}, ")
    length, blocks = len(llm.encode(example["PROMPTS"]["reading"])), len(chunks[1][2][0])
    assert f"reading: {length} prompt + 0 generated tokens, 15 computed, {blocks} blocks" in said["sequences"]
    assert said["record"] == repr(record)


def test_pdb_walks_the_default_model_by_breakpoints(example, default_gguf):
    """Started under pdb, without --stop, a breakpoint at each marked line; the compiled backend."""
    lines = stops()
    assert list(lines) == STAGES
    session = {f"break {stage}": f"b {EXAMPLE}:{line}, len(plan.chunks) == 2" for stage, line in lines.items()} | {
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
    said = dict(zip(session, debug(["-m", "pdb"], session.values(), "--model", default_gguf), strict=True))
    for stage in STAGES:
        assert f"{EXAMPLE}({lines[stage]})walk()" in said[stage]
    llm, seen = LLM(default_gguf), {}
    records, walked = served_by_an_engine(llm, example, seen.__setitem__)
    assert ast.literal_eval(said["tokens"]) == [t for chunk in records[walked].chunks for t in chunk.token_ids]
    gathered = ast.literal_eval(said["gathered"])
    np.testing.assert_array_equal(np.float32(gathered), seen["layers.29.attention.gathered"][0, 0])  # the same bits
    assert ast.literal_eval(said["best"]) == seen["logits"].argmax(axis=1).tolist()
    assert said["text"] == repr(records[walked].chunks[0].sampled[0].text)


ATTENTION_SESSION = """
import sys
from minillm import LLM, SamplingParams
llm = LLM(sys.argv[1])
answer = llm.generate("ab", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
print(answer[0].token_ids)
"""


def test_pdb_stops_in_attention_with_the_default_backend(tiny, tmp_path):
    """The compiled layers run one by one while a debugger is attached, and answer with the same tokens."""
    script = tmp_path / "script.py"
    script.write_text(ATTENTION_SESSION)
    transformer = ROOT / "minillm" / "model" / "transformer.py"
    line = line_of(transformer, "v = self._heads(x, layer.v)")
    session = {
        "break": f"b {transformer}:{line}",
        "first": "c",
        "layer": "p index",
        "shapes": "p (batch.num_tokens, x.shape, k.shape)",
        "again": "c",
        "next layer": "p index",
        "clear": "cl 1",
        "end": "c",
    }
    commands = "\n".join([*session.values(), "q", ""])
    ran = subprocess.run(
        [sys.executable, "-m", "pdb", script, tiny],
        input=commands,
        text=True,
        capture_output=True,
        check=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHON_COLORS": "0"},
    )
    replies = ran.stdout.split("(Pdb) ")[1:]
    said = dict(zip(session, replies, strict=False))
    assert f"{transformer}({line})_attention()" in said["first"]
    assert f"{transformer}({line})_attention()" in said["again"]
    layers = [int(said["layer"]), int(said["next layer"])]
    assert layers == [0, 1]
    num_tokens, x, k = ast.literal_eval(said["shapes"])
    assert (x, k) == ((num_tokens, 64), (num_tokens, 2, 16))
    llm = LLM(tiny)
    assert llm.transformer.fused_layers
    (answer,) = llm.generate("ab", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert str(answer.token_ids) in said["end"]


def test_layers_run_one_by_one_on_request_or_under_a_debugger_with_the_same_bits(tiny, monkeypatch):
    ids = [3, 4, 5, 6, 7, 8, 9]
    fused = LLM(tiny)
    expected = fused.logits(ids)
    seen = []
    layer = Transformer._layer

    def watched(self, *arguments):
        seen.append(arguments[4])
        return layer(self, *arguments)

    monkeypatch.setattr(Transformer, "_layer", watched)
    np.testing.assert_array_equal(fused.logits(ids), expected)
    assert seen == []
    attached = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        under_a_debugger = fused.logits(ids)
    finally:
        sys.settrace(attached)
    np.testing.assert_array_equal(under_a_debugger, expected)
    assert seen == [0, 1]
    one_by_one = LLM(tiny, fused=False)
    del seen[:]
    np.testing.assert_array_equal(one_by_one.logits(ids), expected)
    assert seen == [0, 1]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
def test_a_debugger_that_uses_sys_monitoring_is_noticed():
    assert not debugger_attached()
    sys.monitoring.use_tool_id(sys.monitoring.DEBUGGER_ID, "test")
    try:
        assert debugger_attached()
    finally:
        sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)
    assert not debugger_attached()


def test_the_editor_has_a_configuration_for_both_backends():
    text = (ROOT / ".vscode" / "launch.json").read_text(encoding="utf-8")
    configurations = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))["configurations"]
    ours = [c["args"] for c in configurations if c["program"].endswith("/examples/debug_decode.py")]
    assert ours == [["--stop"], ["--stop", "--backend", "numpy"]]
    for configuration in configurations:
        assert (ROOT / configuration["program"].removeprefix("${workspaceFolder}/")).exists()
