"""`minillm trace`: from a recorded run to a page, and its errors."""

import json
import re
from pathlib import Path

import pytest
from support.builders import random_llama, write_gguf

from minillm import cli
from minillm.trace import Trace


def test_the_page_is_written_beside_the_run(run, tmp_path, capsys, monkeypatch):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run.write(one)
    run.write(other)
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["trace", str(one), "--open"]) == 0
    assert opened == [(tmp_path / "one.html").as_uri()]
    assert cli.main(["trace", str(one), str(other), "-o", str(tmp_path / "two.html"), "--roofline", "46.5,247"]) == 0
    text = (tmp_path / "two.html").read_text(encoding="utf-8")
    assert '"name":"one"' in text
    assert '"name":"other"' in text
    assert "46.5 GB/s, 247 GFLOP/s: the machine's roofline, as given." in text
    assert capsys.readouterr().out.split() == [str(tmp_path / "one.html"), str(tmp_path / "two.html")]
    assert cli.main(["trace", str(one), str(one), "-o", str(tmp_path / "two.html")]) == 0
    assert f'"name":"{one}"' in (tmp_path / "two.html").read_text(encoding="utf-8")  # equal names: the paths are shown


def test_perfetto_events_are_written_as_well(run, tmp_path, capsys):
    one, events = tmp_path / "one.jsonl", tmp_path / "events.json"
    run.write(one)
    assert cli.main(["trace", str(one), "--perfetto", str(events)]) == 0
    assert json.loads(events.read_text(encoding="utf-8"))["traceEvents"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "one.html"), str(events)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one.jsonl", "-o", "one.jsonl"], "error: the page or the events would overwrite the run one.jsonl"),
        (["one.jsonl", "-o", "link.html"], "error: the page or the events would overwrite the run link.html"),
        (["one.jsonl"] * 3, "error: expected one run, or two to show side by side, got 3"),
        (["one.jsonl", "--perfetto", "one.jsonl"], "error: the page or the events would overwrite the run one.jsonl"),
        (
            ["one.jsonl", "--perfetto", "one.html"],
            "error: .* would both be written to one.html",
        ),
        (["one.jsonl", "one.jsonl", "--perfetto", "x.json"], "error: --perfetto writes a single run, got 2"),
        (["absent.jsonl"], "error: .*absent.jsonl"),
        (["."], "error: .*Is a directory: '.'"),
        ([""], "error: .*(Is a directory|No such file)"),
        (["cut.jsonl"], "error: cut.jsonl: line 3 has no line end: the file is truncated"),
        (["empty.jsonl"], "error: empty.jsonl: line 1 is missing: the file is empty"),
        (["one.jsonl", "-o", "no/such/folder.html"], "error: .*no/such/folder.html"),
        (["one.jsonl", "--roofline", "fast"], "'fast' is not two numbers above 0"),
        (["one.jsonl", "--roofline", "1,-2"], "'1,-2' is not two numbers above 0"),
        (["one.jsonl", "--roofline", "1,nan"], "'1,nan' is not two numbers above 0"),
    ],
)
def test_bad_input(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    run.write("one.jsonl")
    whole = Path("one.jsonl").read_bytes()
    Path("cut.jsonl").write_bytes(b"\n".join(whole.splitlines()[:3]))
    Path("empty.jsonl").touch()
    monkeypatch.setattr(cli, "_discard_stdout", lambda: None)  # pytest has replaced it
    Path("link.html").symlink_to("one.jsonl")
    try:
        status = cli.main(["trace", *arguments])
    except SystemExit as error:  # raised by argparse
        status = error.code
    assert status == 2
    assert re.search(message, capsys.readouterr().err)
    assert Path("one.jsonl").read_bytes() == whole
    assert not list(tmp_path.glob("[!l]*.html"))


def test_a_run_is_recorded_and_shown(tmp_path, capsys, monkeypatch):
    model = write_gguf(tmp_path / "tiny.gguf", random_llama(vocab_size=262), with_tokenizer=True)
    saved = tmp_path / "run.jsonl"
    command = ["generate", "hello", "--raw", "--model", str(model), "--max-tokens", "4"]
    assert cli.main([*command, "--trace", str(saved)]) == 0
    trace = Trace.read(saved)
    assert [len(chunk.sampled) for record in trace for chunk in record.chunks] == [1] * 4
    assert trace.facts.costs
    assert trace.steps[0].arrived[0].token_texts == ["hell", "o"]
    assert cli.main(["trace", str(saved)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(cli, "_discard_stdout", lambda: None)  # pytest has replaced it
    assert cli.main([*command, "--trace", str(tmp_path / "no" / "folder.jsonl")]) == 2
    assert capsys.readouterr().out == "hello"  # it fails before the answer
