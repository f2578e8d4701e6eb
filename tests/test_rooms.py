"""Import rules between the packages of minillm, checked by reading every import statement."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minillm"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# Every module may import these. They import none of the other modules.
UTILITIES = {"errors", "checks", "reprs"}
# These packages have one row per module below. Every other package has one row for all its modules.
LISTED_BY_MODULE = {"engine", "model", "trace"}
INTEGER_HALF = {
    "engine.block_allocator",
    "engine.block_demand",
    "engine.block_table",
    "engine.prefix_index",
    "engine.scheduler",
    "engine.sequence",
    "engine.step_plan",
    "engine.waiting_queue",
}
TRACE = {
    "trace",
    "trace.events",
    "trace.file",
    "trace.json_reader",
    "trace.metrics",
    "trace.records",
    "trace.roofline",
    "trace.validation",
}
# What each room may import, beside UTILITIES and itself. A package's name here stands for its `__init__`.
MAY_IMPORT = {
    "errors": set(),
    "checks": set(),
    "reprs": set(),
    # The numbers: no requests, no scheduler.
    "quantization": set(),
    "ops": {"quantization"},
    "model": set(),
    "model.config": set(),
    "model.debugger": set(),
    "model.mixture": set(),
    "model.probe": set(),
    "model.batch": set(),
    "model.rope": {"model.config"},
    "model.weights": {"model.config"},
    "model.kv_cache": {"model.config"},
    "model.transformer": {
        "model.batch",
        "model.config",
        "model.debugger",
        "model.kv_cache",
        "model.mixture",
        "model.probe",
        "model.rope",
        "model.weights",
        "ops",
    },
    # Files and text.
    "tokenizer": set(),
    "checkpoints": {"model.config", "model.rope", "quantization", "tokenizer"},
    "catalog": set(),
    # Plain records of a run, and what is computed from them.
    "trace.events": set(),
    "trace.roofline": {"model.config"},
    "trace.records": {"trace.events", "trace.roofline"},
    "trace.json_reader": set(),
    "trace.validation": {"trace.events", "trace.records"},
    "trace.file": {"trace.json_reader", "trace.records", "trace.validation"},
    "trace.metrics": {"trace.events", "trace.file", "trace.records"},
    "trace": TRACE - {"trace"},
    # The integer half of the engine: no arrays, no model, no clock.
    "engine.block_table": set(),
    "engine.prefix_index": set(),
    "engine.block_allocator": {"engine.block_table", "engine.prefix_index"},
    "engine.block_demand": {"engine.block_allocator", "engine.block_table", "engine.sequence"},
    "engine.sequence": {"engine.block_table", "engine.prefix_index", "trace.events"},
    "engine.step_plan": {"engine.sequence", "trace.events"},
    "engine.waiting_queue": {"engine.sequence"},
    "engine.scheduler": {
        "engine.block_allocator",
        "engine.block_demand",
        "engine.block_table",
        "engine.sequence",
        "engine.step_plan",
        "engine.waiting_queue",
        "trace.events",
    },
    # The rest of the engine joins the two halves.
    "engine.exclusive": set(),
    "engine.delivery": {"engine.exclusive", "trace.records"},
    "engine.stopping": set(),
    "engine.sampling": {"trace.events"},
    "engine.detokenizing": {"engine.sampling", "engine.stopping", "tokenizer"},
    "engine.recording": {
        "engine.sampling",
        "engine.scheduler",
        "engine.step_plan",
        "trace.events",
        "trace.records",
    },
    "engine.request": {"engine.detokenizing", "engine.sampling", "engine.sequence", "tokenizer"},
    "engine.config": {"engine.block_allocator", "engine.scheduler", "model.kv_cache"},
    "engine.engine": {
        "engine.delivery",
        "engine.exclusive",
        "engine.recording",
        "engine.request",
        "engine.sampling",
        "engine.scheduler",
        "engine.sequence",
        "engine.step_plan",
        "model.batch",
        "model.kv_cache",
        "model.probe",
        "model.transformer",
        "tokenizer",
        *TRACE,
    },
    "engine": {"engine.config", "engine.engine", "engine.request"},
    # What people look at.
    "view": TRACE,
    "outputs": {"engine.block_table", "engine.exclusive", "engine.sampling", *TRACE},
    "info": {
        "catalog",
        "checkpoints",
        "engine",
        "engine.block_allocator",
        "engine.block_demand",
        "model.config",
        "model.kv_cache",
        "ops",
        "quantization",
        "tokenizer",
        *TRACE,
    },
}
# The front door may import anything except these.
MAY_NOT_IMPORT = {
    "llm": {"bench", "cli", "info", "view"},
    "bench": {"cli"},
    "cli": set(),
    "": {"bench", "cli", "info", "view"},
}
CORE_DEPENDENCIES = {"numpy", "numba", "tokenizers", "rich", "jinja2", "huggingface_hub"}
# Libraries that only an extra installs, and the one module that imports each. Peers run in processes of their own, and
# no module imports theirs. Plots import Matplotlib when they draw, the GPU backend CuPy when it is chosen.
EXTRAS = {
    "minillm.bench.engines.llama_cpp": {"llama_cpp"},
    "minillm.bench.engines.transformers": {"torch", "transformers"},
    "minillm.bench.plot": {"matplotlib"},
    "minillm.view.plots": {"matplotlib"},
    "minillm.ops.gpu.device": {"cupy"},
}
COMES_WITH_NUMBA = {f"minillm.ops.jit.{module}": {"llvmlite"} for module in ("prefetching", "weight_formats")}
CLOCKS = {"time", "datetime"}


def room_of(module):
    """The key of a module in the tables, such as `engine.sequence`, or `ops` for minillm.ops.jit.tiles."""
    package, _, rest = module.removeprefix("minillm").removeprefix(".").partition(".")
    return f"{package}.{rest}" if rest and package in LISTED_BY_MODULE else package


def imports(module):
    """Full names of all modules that a module imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import on line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def internal_imports(module):
    return {name for name in imports(module) if name.split(".")[0] == "minillm"}


def external_imports(module):
    return {name.split(".")[0] for name in imports(module)} - sys.stdlib_module_names - {"minillm"}


def everything_imported(module):
    """The module and all modules of minillm that it imports, directly or through others."""
    reached, pending = set(), [module]
    while pending:
        current = pending.pop()
        if current not in reached:
            reached.add(current)
            pending += internal_imports(current)
    return reached


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_its_room_may_import(module):
    room = room_of(module)
    imported = {room_of(name) for name in internal_imports(module)} - {room} - UTILITIES
    if room in MAY_NOT_IMPORT:
        assert not {name.partition(".")[0] for name in imported} & MAY_NOT_IMPORT[room]
    else:
        assert room in MAY_IMPORT, f"add a row for {room!r} to MAY_IMPORT"
        assert imported <= MAY_IMPORT[room]


def test_the_tables_name_only_rooms_that_exist():
    rooms = {room_of(module) for module in MODULES}
    assert set(MAY_IMPORT) | set(MAY_NOT_IMPORT) == rooms
    assert set().union(*MAY_IMPORT.values(), UTILITIES, INTEGER_HALF) <= rooms
    assert {*EXTRAS, *COMES_WITH_NUMBA} <= set(MODULES)


def test_utilities_import_no_other_room():
    for utility in UTILITIES:
        assert {room_of(name) for name in internal_imports(f"minillm.{utility}")} <= {"errors"}


@pytest.mark.parametrize("room", sorted(INTEGER_HALF))
def test_the_integer_half_needs_no_arrays_no_model_and_no_clock(room):
    """Nor does any module that it imports, so that the scheduler can be tested and simulated on its own."""
    for module in everything_imported(f"minillm.{room}"):
        assert not external_imports(module), module
        assert not CLOCKS & set(imports(module)), module
    assert not {name for name in internal_imports(f"minillm.{room}") if room_of(name).startswith("model")}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_core_dependencies_are_imported(module):
    assert external_imports(module) <= CORE_DEPENDENCIES | EXTRAS.get(module, set()) | COMES_WITH_NUMBA.get(
        module, set()
    )


@pytest.mark.parametrize("module", sorted(MODULES))
def test_extras_are_imported_only_when_needed(module):
    assert not [name for name in imports(module) if name.startswith("minillm.bench.engines.")]
    if module in EXTRAS and ".engines." not in module:
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        at_the_top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [line for line in at_the_top if line.split()[1].split(".")[0] in EXTRAS[module]]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_keeps_state(module):
    """No `global` statement, and no empty list, dict or set at the top of a module for functions to fill."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        value = getattr(node, "value", None)
        is_empty = (isinstance(value, ast.List | ast.Dict) and not ast.unparse(value).strip("[]{}")) or (
            isinstance(value, ast.Call) and ast.unparse(value) in ("list()", "dict()", "set()")
        )
        assert not is_empty, f"{module}:{node.lineno}"
