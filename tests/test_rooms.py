"""Who may import whom: DESIGN's rooms, held by reading every import statement."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minillm"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# What each room may use of the others. Everybody may use `errors`. A room that is not here may use no other.
MAY_USE = {
    "config": set(),
    "quantization": set(),
    "roofline": {"config"},
    "rope": {"config"},
    "weights": {"config"},
    "ops": {"quantization"},
    "short": {"blocks"},
    "probe": set(),
    "batch": {"blocks", "plan", "short"},
    "prefix_index": set(),
    "blocks": {"prefix_index"},
    "sequence": {"blocks", "prefix_index"},
    "waiting": {"sequence"},
    "plan": {"sequence", "short"},
    "scheduler": {"blocks", "checks", "plan", "sequence", "waiting"},
    "checks": set(),
    "sampling": {"checks"},
    "stopping": set(),
    "kv_cache": {"blocks", "config"},
    "transformer": {"ops", "batch", "kv_cache", "config", "probe", "rope", "weights"},
    "tokenizer": set(),
    "checkpoints": {"config", "quantization", "rope", "tokenizer"},
    "catalog": set(),
    "trace": {"blocks", "roofline", "short"},
    "outputs": {"sampling", "trace"},
    "engine": {
        "batch",
        "blocks",
        "checks",
        "kv_cache",
        "plan",
        "probe",
        "roofline",
        "sampling",
        "scheduler",
        "sequence",
        "stopping",
        "tokenizer",
        "trace",
        "transformer",
    },
    "info": {
        "blocks",
        "catalog",
        "checkpoints",
        "config",
        "engine",
        "kv_cache",
        "ops",
        "quantization",
        "roofline",
        "tokenizer",
    },
    "view": {"roofline", "trace"},
    "plots": {"roofline", "trace"},
}
# These stand on top and may use whatever they need, but not each other's betters.
FRONT = {"llm": {"cli", "bench"}, "bench": {"cli"}, "cli": set(), "": {"cli", "bench"}}  # room -> what it may not use
INTEGERS_ONLY = {"sequence", "blocks", "prefix_index", "waiting", "plan", "scheduler", "short"}
ARRAY_LIBRARIES = {"numpy", "numba", "torch", "cupy"}
CORE = {"numpy", "numba", "tokenizers", "rich", "jinja2", "huggingface_hub"}
# What an extra brings, and the one module that may use it. The engines are run, each in a process of its own, and never
# imported; the plots import only when they draw, the GPU's backend when it is asked for.
EXTRAS = {
    "minillm.bench.engines.llama_cpp": {"llama_cpp"},
    "minillm.bench.engines.transformers": {"torch", "transformers"},
    "minillm.bench.plot": {"matplotlib"},
    "minillm.view.plots": {"matplotlib"},
    "minillm.ops.gpu.device": {"cupy"},
}
COMES_WITH_NUMBA = {f"minillm.ops.jit.{room}": {"llvmlite"} for room in ("forms", "prefetching")}


def room_of(module):
    return module.split(".")[1] if "." in module else ""


def imports(path):
    """Full names of all modules a file imports, wherever in it they stand, under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_uses_only_rooms_below_it(module):
    room = room_of(module)
    used = {room_of(name) for name in imports(MODULES[module]) if name.split(".")[0] == "minillm"} - {room, "errors"}
    if room in FRONT:
        assert not used & FRONT[room]
    else:
        assert used <= MAY_USE.get(room, set())


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_core_dependencies_are_imported(module):
    outside = {name.split(".")[0] for name in imports(MODULES[module])} - sys.stdlib_module_names - {"minillm"}
    assert outside <= CORE | EXTRAS.get(module, set()) | COMES_WITH_NUMBA.get(module, set())
    if room_of(module) in INTEGERS_ONLY:
        assert not outside
        assert "time" not in set(imports(MODULES[module]))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_extras_are_imported_only_when_needed(module):
    assert not [name for name in imports(MODULES[module]) if name.startswith("minillm.bench.engines.")]
    if module in EXTRAS and ".engines." not in module:
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        at_the_top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [line for line in at_the_top if line.split()[1].split(".")[0] in EXTRAS[module]]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_keeps_state(module):
    """No `global`, and no empty list, dict or set at the top of a module waiting to be filled."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        value = getattr(node, "value", None)
        is_empty = (isinstance(value, ast.List | ast.Dict) and not ast.unparse(value).strip("[]{}")) or (
            isinstance(value, ast.Call) and ast.unparse(value) in ("list()", "dict()", "set()")
        )
        assert not is_empty, f"{module}:{node.lineno}"
