"""A model's facts as tables: on a terminal, or as Markdown for a file or another program."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from minillm.checkpoints import Checkpoint
from minillm.engine import EngineConfig
from minillm.info.facts import TensorGroup, count_parameters, tensor_groups, total
from minillm.info.memory import Memory, contexts, positions_held, sequence_bytes, sequences_that_fit
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.kv_cache import DTYPES
from minillm.tokenizer import Tokenizer
from minillm.trace.roofline import kv_bytes_per_token

BYTES_PER_NUMBER = {"float32": 4, "float16": 2}


def show(checkpoint: Checkpoint, memory: Memory | None, console: Console) -> None:
    """Print the model's sizes, the types of its tensors, and what fits into `memory` (None: unknown)."""
    plain = not console.is_terminal
    if plain:  # no terminal limits the width
        console = Console(file=console.file, width=240, color_system=None)
    groups = tensor_groups(checkpoint)

    def line(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    console.print(_model_table(checkpoint, plain=plain))
    console.print(_tensor_table(groups, checkpoint.config, plain=plain))
    if memory is None:
        line("This system does not report its memory; use --memory to give an amount.")
        return
    weights = total(groups, "bytes_in_memory")
    has_room = weights < memory.available
    line(
        f"{format_bytes(memory.available)} of {format_bytes(memory.total)} of memory are available. The weights take "
        f"{format_bytes(weights)}{', and the rest has room for:' if has_room else ', which do not fit.'}"
    )
    if has_room:
        console.print(_fit_table(checkpoint.config, memory.available - weights, plain=plain))
        config = checkpoint.config
        window = config.sliding_window if config.window_layers else None
        if (max_held := positions_held(config.context_length, window, EngineConfig())) < config.context_length:
            layers = f"{len(config.window_layers)} of {config.num_layers} layers"
            line(f"{layers} read only the last {window:,} positions; there, a sequence holds at most {max_held:,}.")
        line("Python, compiled code and intermediate results take additional memory.")


def format_bytes(num_bytes: float) -> str:
    """Format bytes in the unit that leaves one to three digits before the decimal point."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"


def _table(plain: bool, show_footer: bool = False) -> Table:
    return Table(box=box.MARKDOWN if plain else box.SIMPLE_HEAD, show_footer=show_footer)


# --- the model


def _model_table(checkpoint: Checkpoint, *, plain: bool) -> Table:
    table = _table(plain)
    table.add_column("model")
    table.add_column(checkpoint.path.name, overflow="fold")
    for name, text in model_facts(checkpoint):
        table.add_row(name, text)
    return table


def model_facts(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    """Yield the name and the text of each fact."""
    c = checkpoint.config
    stored = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
    parameters = count_parameters(checkpoint)
    yield "path", str(checkpoint.path.absolute())
    yield "architecture", c.architecture
    yield (
        "parameters",
        f"{parameters / 1e6:,.1f} million, {8 * stored / parameters:.2f} bits each: {format_bytes(stored)}",
    )
    yield "layers", f"{c.num_layers} of {c.hidden_size:,} numbers per token; feed-forward {_feed_forward(c)}"
    yield (
        "attention",
        f"{c.num_heads} query heads, {c.num_kv_heads} key/value heads, each of {c.head_dim} numbers",
    )
    yield "context", f"{c.context_length:,} positions{_windows(c)}"
    yield "positions", _positions(c)
    yield "vocabulary", f"{c.vocab_size:,}, head {'tied to the embedding' if c.tie_embeddings else 'separate'}"
    yield "tokenizer", _tokenizer(checkpoint.tokenizer)
    if checkpoint.recommended_sampling:
        yield "recommended", ", ".join(f"{name} {value:g}" for name, value in checkpoint.recommended_sampling.items())
    kv = (f"{kv_bytes_per_token(c, BYTES_PER_NUMBER[dtype]):,} bytes as {dtype}" for dtype in DTYPES)
    yield "KV cache per token", ", ".join(kv)


def _feed_forward(config: ModelConfig) -> str:
    if not config.num_experts:
        return f"{config.intermediate_size:,}"
    return f"{config.num_experts} experts of {config.intermediate_size:,}, {config.experts_per_token} per token"


def _windows(config: ModelConfig) -> str:
    if not config.window_layers:
        return ""
    return f"; the last {config.sliding_window:,} in {len(config.window_layers)} of {config.num_layers} layers"


def _positions(config: ModelConfig) -> str:
    if config.learned_positions:
        return "learned"
    own = f", {config.window_rope_theta:,.0f} in layers with a window" if config.window_rope_theta else ""
    return f"rotary, theta {config.rope_theta:,.0f}{_scaling(config.rope_scaling)}{own}"


def _scaling(scaling: RopeScaling | None) -> str:
    if scaling is None:
        return ""
    return f", {scaling.kind} scaling" + (f" by {scaling.factor:g}" if not scaling.factors else "")


def _tokenizer(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "none: token ids only"
    ends = " ".join(tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids) or "nothing"
    template = "a chat template" if tokenizer.chat_template is not None else "no chat template"
    return f"{tokenizer.algorithm}, {tokenizer.vocab_size:,} tokens; end of text: {ends}; {template}"


# --- the tensors


def _tensor_table(groups: list[TensorGroup], config: ModelConfig, *, plain: bool) -> Table:
    table = _table(plain, show_footer=not plain)
    stored, in_memory = total(groups, "num_bytes"), total(groups, "bytes_in_memory")
    table.add_column("part", "all")
    table.add_column("type")
    table.add_column("count", f"{total(groups, 'count'):,}", justify="right")
    table.add_column("numbers", _millions(total(groups, "num_values")), justify="right")
    table.add_column("in file", format_bytes(stored), justify="right")
    table.add_column("loaded as")
    table.add_column("in memory", format_bytes(in_memory), justify="right")
    for group in groups:
        table.add_row(
            group.part,
            group.storage,
            f"{group.count:,}",
            _millions(group.num_values),
            format_bytes(group.num_bytes),
            group.memory_type + (", widened" if group.is_widened else ""),
            format_bytes(group.bytes_in_memory),
        )
    if config.tie_embeddings:
        table.add_row("head", "tied")
    if plain:  # Markdown has no footers
        table.add_row(*(str(column.footer) for column in table.columns))
    return table


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"


# --- what fits into memory


def _fit_table(config: ModelConfig, free: int, *, plain: bool) -> Table:
    """Return a table with one line per context length: the bytes of a sequence, and how many sequences fit."""
    table = _table(plain)
    table.add_column("context", justify="right")
    for dtype in DTYPES:
        table.add_column(f"per sequence, {dtype}", justify="right")
        table.add_column("sequences", justify="right")
    for context in contexts(config.context_length):
        cells = [f"{context:,}"]
        for dtype in DTYPES:
            num_bytes = sequence_bytes(config, context, BYTES_PER_NUMBER[dtype], EngineConfig())
            fitting = sequences_that_fit(free, num_bytes)
            cells += [format_bytes(num_bytes), f"{fitting:,}" if fitting else "none"]
        table.add_row(*cells)
    return table
