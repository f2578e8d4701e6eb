"""The command `minillm bench`, and the description of the machine."""

import importlib.util
import json

import pytest

from minillm import bench, cli
from minillm.bench import machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "nonsense"], "row 'nonsense' is unknown"),
        (["--rounds", "0"], "rounds is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--threads", "100000"], "threads is 100000"),
        (["--json", "no/such/folder/file.json"], "does not exist; create it first"),
        (["--as", "Q9"], "storage type 'Q9' is unknown"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments, message, capsys, monkeypatch, tiny_gguf):
    monkeypatch.setattr(bench.benchmark, "measure_machine", None)  # a call would raise
    assert cli.main(["bench", "--model", str(tiny_gguf), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused(capsys, monkeypatch, tiny_gguf, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert cli.main(["bench", "--model", str(tiny_gguf), "--plot", str(tmp_path / "roofline.png")]) == 2
    assert "[plot]" in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_json(capsys, monkeypatch, tiny_gguf, tmp_path):
    monkeypatch.setattr(bench.benchmark, "PEERS", ())
    arguments = [
        "--rows",
        "decode-64",
        "exactness",
        "--quick",
        "--threads",
        "1",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    assert cli.main(["bench", "--model", str(tiny_gguf), *arguments]) == 0
    assert "decode at 64 tokens of context" in capsys.readouterr().out
    report = json.loads((tmp_path / "figures.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["decode-64", "exactness"]
    assert "--peers" in report["rows"][1]["skipped"]


def test_the_machine_is_described():
    description = machine.describe_machine(1)
    assert description.cpu
    assert description.cores >= 1
    assert machine.last_level_cache_bytes() >= 0
