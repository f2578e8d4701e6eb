"""`minillm info`: what it says of a file is what loading the file shows."""

import io
import os
import re
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.builders import TINY, random_llama, random_model, write_gguf

from minillm import cli
from minillm.checkpoints import open_checkpoint
from minillm.engine import EngineConfig
from minillm.info import (
    Memory,
    contexts,
    count_parameters,
    find_memory,
    memory,
    positions_held,
    sequence_bytes,
    sequences_that_fit,
    tensor_groups,
)
from minillm.info.report import BYTES_PER_NUMBER, format_bytes, show
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import DTYPES, KVCache
from minillm.model.transformer import Transformer
from minillm.ops import backend
from minillm.trace.roofline import kv_bytes_per_token

NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 320}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, random_llama(**NARROW, tie_word_embeddings=True), "Q5_0", with_tokenizer=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder: a mixture of experts, in bfloat16."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**TINY | {"hidden_size": 128, "head_dim": 32} | experts)
    path = tmp_path_factory.mktemp("mixture")
    random_model(config).bfloat16().save_pretrained(path)
    return path


def loaded(checkpoint):
    """Bytes of the weights once they are loaded, whoever holds them."""
    ops = backend("numba")
    transformer = Transformer(checkpoint.config, lambda name: checkpoint.tensors[name].read(), ops)
    seen = [transformer.embedding, *([] if checkpoint.config.tie_embeddings else [transformer.head])]
    for layer in transformer.layers:
        for owner in (layer, layer.mlp, *getattr(layer.mlp, "experts", ())):
            seen += [part.weight for part in vars(owner).values() if hasattr(part, "weight")]
    seen.append(transformer.final_norm.weight)
    return sum(weight.nbytes if hasattr(weight, "nbytes") else ops.num_bytes(weight) for weight in seen)


@pytest.mark.parametrize("name", ["gguf_file", "mixture"])
def test_what_is_foretold_is_what_loading_takes(request, name):
    path = request.getfixturevalue(name)
    checkpoint = open_checkpoint(path)
    groups = tensor_groups(checkpoint)
    assert sum(group.count for group in groups) == len(checkpoint.tensors)
    assert sum(group.num_values for group in groups) == count_parameters(checkpoint)
    assert sum(group.num_bytes for group in groups) == sum(t.data.nbytes for t in checkpoint.tensors.values())
    assert sum(group.bytes_in_memory for group in groups) == loaded(checkpoint)
    for dtype, num_bytes in BYTES_PER_NUMBER.items():
        cache = KVCache(checkpoint.config, num_blocks=1, block_size=1, dtype=dtype)
        assert kv_bytes_per_token(checkpoint.config, num_bytes) == cache.bytes_per_token


def test_groups(gguf_file, mixture):
    found = {
        (g.part, g.storage): (g.count, g.memory_type, g.is_widened) for g in tensor_groups(open_checkpoint(gguf_file))
    }
    assert found == {
        ("embedding", "Q5_0"): (1, "5 bits", False),
        ("attention", "Q5_0"): (8, "5 bits", False),
        ("mlp", "Q5_0"): (6, "5 bits", False),
        ("norms", "F32"): (5, "float32", False),
    }
    found = [(g.part, g.storage, g.count, g.memory_type, g.is_widened) for g in tensor_groups(open_checkpoint(mixture))]
    assert found == [
        ("embedding", "BF16", 1, "bfloat16", False),
        ("attention", "BF16", 8, "bfloat16", False),
        ("mlp", "BF16", 2 * (1 + 3 * 4), "bfloat16", False),
        ("norms", "BF16", 5, "float32", True),
        ("head", "BF16", 1, "bfloat16", False),
    ]


def test_piped_it_is_plain_text(gguf_file, capsys):
    assert cli.main(["info", str(gguf_file), "--memory", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in out.splitlines() if "|" in line]
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["architecture"] == "llama"
    assert facts["layers"] == "2 of 256 numbers per token; feed-forward 512"
    assert facts["attention"] == "4 query heads, 2 key/value heads, each of 64 numbers"
    assert facts["context"] == "128 positions"
    assert facts["vocabulary"] == "320, head tied to the embedding"
    assert facts["tokenizer"].startswith("byte-level BPE, ")
    assert facts["KV cache per token"] == "2,048 bytes as float32, 1,024 bytes as float16"
    assert ["head", "tied", *[""] * 5] in rows
    available = 500_000_000 - sum(group.bytes_in_memory for group in tensor_groups(open_checkpoint(gguf_file)))
    floats, halves = available // (128 * 2048), available // (128 * 1024)
    assert rows[-1] == ["128", "262.1 KB", f"{floats:,}", "131.1 KB", f"{halves:,}"]


def test_a_terminal_s_width_is_enough(gguf_file):
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    show(open_checkpoint(gguf_file), Memory(10**9, 10**9), screen)
    text = re.sub(r"\x1b\[\d*m", "", screen.file.getvalue())
    (heading,) = [line for line in text.splitlines() if "part" in line]
    assert heading.split() == ["part", "type", "count", "numbers", "in", "file", "loaded", "as", "in", "memory"]
    assert re.search(r"\battention +Q5_0 +8 +[\d,]+ +[\d.]+ KB +5 bits +[\d.]+ KB", text)


def test_what_has_no_room_and_what_is_not_known(gguf_file, mixture, capsys, monkeypatch):
    assert cli.main(["info", str(mixture), "--memory", "0.00001"]) == 0
    out, _ = capsys.readouterr()
    assert "which do not fit" in out
    assert "4 experts of 96, 2 per token" in out
    assert "none: token ids only" in out
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    assert find_memory() is None
    assert cli.main(["info", str(gguf_file)]) == 0
    assert "does not report its memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no/such.gguf"], "error: model 'no/such.gguf': no such file"),
        ([__file__], "the file is not a .gguf file"),
        (["--memory", "nan"], "error: --memory is nan"),
        (["--memory", "-1"], "error: --memory is -1.0; it must be a finite number of gigabytes, above 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, complaint):
    assert cli.main(["info", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


def test_a_damaged_file_is_told_as_everywhere(gguf_file, tmp_path, capsys):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(gguf_file).read_bytes()[:-100])
    assert cli.main(["info", str(cut)]) == 2
    assert "the file ends at" in capsys.readouterr().err


# ---- memory


def test_this_machine_s_memory():
    found = find_memory()
    assert 0 < found.available <= found.total


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", "5", (None, 4096)),
        ("3000", "1000", (3000, 2000)),
        ("3000", "4000", (3000, 0)),
        (None, None, (None, 4096)),
    ],
    ids=["no limit", "a container", "a full one", "no such files"],
)
def test_a_container_s_limit(tmp_path, monkeypatch, limit, used, expected):
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable:       4 kB\n")
    if limit:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert find_memory() == Memory(expected[0] or total, expected[1])


@given(longest=st.integers(1, 10**7))
def test_contexts_grow_to_the_longest(longest):
    lengths = contexts(longest)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == longest
    assert len(lengths) < 10


@given(st.integers(1, 20_000), st.integers(1, 5000), st.integers(1, 40), st.integers(1, 600))
def test_behind_a_window_no_more_is_held_than_the_window_and_a_step_take(context, reach, size, budget):
    """Wherever in a block the window of the step's first token begins."""
    engine, seen = EngineConfig(block_size=size, max_batch_tokens=budget), reach - 1 + budget
    spanned = max((start + seen - 1) // size - start // size + 1 for start in range(size))
    assert positions_held(context, reach, engine) == min(context, spanned * size)
    assert positions_held(context, None, engine) == context


def test_a_model_of_windows_says_what_a_sequence_holds(tmp_path, capsys):
    windows = {"sliding_window": 100, "max_position_embeddings": 4096}
    random_model(transformers.MistralConfig(**TINY | windows)).save_pretrained(tmp_path)
    assert cli.main(["info", str(tmp_path), "--memory", "0.5"]) == 0
    out, _ = capsys.readouterr()
    assert "4,096 positions; the last 100 in 2 of 2 layers" in out
    assert "2 of 2 layers read only the last 100 positions; there, a sequence holds at most 640." in out
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in out.splitlines() if "|" in line]
    by_context = {row[0]: row[1:] for row in rows}
    assert by_context["4,096"] == by_context["1,024"]  # 640 positions of 2 layers' 2 keys and 2 values of 16
    assert by_context["4,096"][0] == format_bytes(640 * 2 * 2 * 2 * 16 * 4)


@given(st.sets(st.integers(0, 8)), st.integers(1, 300), st.integers(1, 60), st.sampled_from(DTYPES))
def test_what_a_sequence_holds_are_blocks_of_the_cache(windowed, window, rows, dtype):
    """As many as its scheduler reckons with, of the size they have there, whichever layers have the window."""
    tiny = ModelConfig("tiny", 70, 24, 40, 9, 4, 2, 8, 10_000, sliding_window=window, window_layers=tuple(windowed))
    engine = EngineConfig(max_batch_tokens=64)
    cache = KVCache(tiny, num_blocks=1, block_size=engine.block_size, dtype=dtype)
    held = engine.scheduler(cache).max_live_blocks(rows * engine.block_size) * cache.bytes_per_block
    assert sequence_bytes(tiny, rows * engine.block_size, BYTES_PER_NUMBER[dtype], engine) == held


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**12))
def test_as_many_as_fit(free, num_bytes):
    count = sequences_that_fit(free, num_bytes)
    assert count * num_bytes <= max(free, 0) < (count + 1) * num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (253_113_024, "253.1 MB"), (5e12, "5,000.0 GB")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text
