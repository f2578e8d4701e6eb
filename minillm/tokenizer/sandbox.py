"""The sandbox chat templates run in: nothing out of reach is touched, and nothing takes long or grows large.

Jinja's immutable sandbox already keeps a template away from Python's internals and from files. What it does
not limit is *how much* a template does: `'a' * 10**10`, five nested loops, a string doubled forty times. Three
rules do that here:

1. What no chat template needs is refused: tags that load or inherit, powers, `varargs`, numbers beyond 64 bits.
2. A rendering has a `Budget` and pays for each step and for each character and item it makes, *before* the
   work wherever one operation can make much out of little (`*`, `replace`, `join`, ...), for afterwards the
   memory is gone. What is inside a container is counted when it is made, and it nests `MAX_DEPTH` deep at most.
3. By rule 2 no value is large, so no single operation on values is slow. All of them come through here, and each
   looks at the clock.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from minillm.tokenizer.metering import MAX_INTEGER, GenerationTag, Metered

STEP = 10  # units a loop round, an operation or a call costs
SECONDS = 2.0  # of computing that any rendering may take, and one more for each UNITS_PER_SECOND of its budget
UNITS_PER_SECOND = 50_000_000
MAX_DEPTH = 100  # containers in containers
MAX_NUMBER = 100_000  # largest integer argument of methods of text, and of filters that make room: widths, precisions

# The built-in filters a template may use. Left out are those that can make much out of little
# (center, batch, groupby, ...) and those that no text needs (random, urlize, xmlattr, ...).
PLAIN_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int"),
    *("items", "last", "length", "list", "lower", "max", "min", "reject", "rejectattr", "reverse", "round", "safe"),
    *("select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
)
SIZING_FILTERS = ("indent", "round", "tojson")  # those whose numbers say how large the result will be

# Methods that do much with little, and that no chat template needs.
REFUSED_METHODS = (
    *("changed", "encode", "expandtabs", "format_map", "from_bytes", "fromkeys", "maketrans", "striptags", "to_bytes"),
    *("translate", "unescape"),
)

# `%s`, `%(name)5.2f` and `{}`, `{name:>5}`: formats whose widths have at most two digits.
PERCENT_FIELD = re.compile(r"%(?:\(\w*\))?[-+ #0]*\d{0,2}(?:\.\d{0,2})?[a-zA-Z%]")
BRACE_FIELD = re.compile(r"\{\{|\}\}|\{[\w.]*(?:![rsa])?(?::[<>=^]?[-+ ]?#?,?\d{0,2}(?:\.\d{1,2})?[a-z%]?)?\}")
FIELD_UNITS = 500  # more than any such field makes of a number
DATE_LAYOUT = re.compile(r"(?:[^%]|%-?[a-zA-Z%]){0,100}", re.DOTALL)


class Budget:
    """What a rendering may still spend: units of work, and seconds of its thread's computing."""

    def __init__(self, units: int):
        self.units = self.left = units
        self.seconds = SECONDS + units / UNITS_PER_SECOND
        self.deadline = time.thread_time() + self.seconds

    def spend(self, units: int) -> None:
        """Pay, or raise `SecurityError`."""
        self.left -= units
        if self.left < 0:
            raise SecurityError(f"stopped: it loops too often or makes too much text (more than {self.units:,} units)")
        if time.thread_time() > self.deadline:
            raise SecurityError(f"stopped: still running after {self.seconds:.1f} s of computing")

    def pay_each(self, texts: Iterable[str], extra: int = 0) -> Iterator[str]:
        """`texts` again, each paid for by its length (plus `extra`) as it passes."""
        for text in texts:
            self.spend(len(text) + extra)
            yield text

    def pay_result(self, result: Any) -> Any:
        """`result`, paid for by its length; an iterator or a dict's view becomes a list.

        Lazy results would move work out of sight, to whoever reads them later.
        """
        if isinstance(result, str | list | tuple | dict):
            self.spend(len(result))
        elif isinstance(result, int) and abs(result) >= MAX_INTEGER:
            raise SecurityError("stopped: an integer of more than 64 bits")
        elif isinstance(result, Iterator | MappingView):
            items = []
            for item in result:
                self.spend(STEP)
                items.append(item)
            return items
        return result

    def measured(self, value: Any) -> Any:
        """`value`, refused if all that is inside it, shared parts counted each time, is more than the whole budget.

        Done where a container is put together. Without it, `x = [x, x]` repeated forty times is a small
        object that takes 2^40 steps to print or to compare.
        """
        self.spend(STEP)
        if deep_size(value, self.units) > self.units:
            raise SecurityError(f"stopped: a list or dict that holds more than {self.units:,} characters and items")
        return value


def deep_size(value: Any, limit: int, depth: int = 0) -> int:
    """Characters and items in nested containers, counting a shared part each time; stops beyond `limit`.

    Raises `SecurityError` where they nest deeper than `MAX_DEPTH`: C code that descends into a value (to hash
    it, say) may not look after its stack.
    """
    if isinstance(value, str):
        return len(value) + 1
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return 1
    if depth == MAX_DEPTH:
        raise SecurityError(f"stopped: lists or dicts nested more than {MAX_DEPTH} deep")
    size = 1
    for part in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
        size += deep_size(part, limit - size, depth + 1)
        if size > limit:
            break
    return size


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment templates are written for (that of transformers), with a budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})

    def __init__(self, budget: Budget):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=_print,
            optimized=False,  # nothing is computed at compile time, where no budget is watched
        )
        self.budget = budget
        # No lipsum, cycler or joiner; and `dict` as a function, for the type has methods of its own.
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        filters = {name: FILTERS[name] for name in PLAIN_FILTERS}
        filters |= {"join": self._join, "replace": self._replace, "indent": self._indent, "tojson": self._tojson}
        filters |= {"map": self._map, "format": self._format, "made": budget.pay_result}
        filters |= {"container": budget.measured, "concat": self._concat}
        self.filters = {name: self._paid(name, function) for name, function in filters.items()}
        self.tests = {name: self._paid(name, function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return Metered().visit(super()._parse(source, name, filename))

    def step(self, text: int) -> None:
        """What `Metered` has every loop round and macro call pay, besides the call itself."""
        self.budget.spend(text)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rule, less the methods that blow text up."""
        return attr not in REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes through here."""
        self.budget.spend(STEP)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        if isinstance(owner, str):
            if name == "replace":
                return self._replace(owner, *args, **kwargs)
            if name == "join":
                args = (self.budget.pay_each(*args, extra=len(owner)),)
            self._pay_search(owner, args)
            _refuse_large_numbers([*args, *kwargs.values()])
        elif function is _Namespace or function is self.globals["dict"]:
            self.budget.measured([args, kwargs])
        return self.budget.pay_result(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic comes through here before it is computed."""
        self.budget.spend(STEP)
        if operator == "%" and isinstance(left, str):
            self._check_format(left, PERCENT_FIELD, "%", right)
        elif operator == "*":
            self.budget.spend(_product_size(left, right))
        elif operator == "+" and isinstance(left, str | list | tuple):
            self.budget.measured([left, right])
        return self.budget.pay_result(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` as Jinja's sandbox wraps it, its fields checked first."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, BRACE_FIELD, "{", [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that is paid for."""
        first = int(hasattr(function, "jinja_pass_arg"))  # Jinja's mark "wants the environment first"

        @functools.wraps(function)  # carries the mark over
        def paid(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(STEP)
            subject, *others = *args[first:], *kwargs.values()
            self._pay_search(subject, others)
            if name in SIZING_FILTERS:
                _refuse_large_numbers(others)
            return self.budget.pay_result(function(*args, **kwargs))

        return paid

    def _pay_search(self, subject: Any, wanted: Iterable[Any]) -> None:
        """Pay for what may look at each character (or item) of one with each of the other, 100 times a unit.

        Stripping and searching compare them; an attribute's name such as `"a.b.c"` is followed for every item.
        """
        if isinstance(subject, Sized):
            self.budget.spend(sum(len(subject) * len(other) // 100 for other in wanted if isinstance(other, str)))

    def _check_format(self, layout: str, field: re.Pattern[str], opening: str, arguments: Any) -> None:
        """Refuse wide fields such as `%0999999999d`, and pay for the arguments once for each field."""
        if opening in field.sub("", layout):
            raise SecurityError(f"the format {layout[:60]!r} has a field that chat templates may not use")
        self.budget.spend(layout.count(opening) * (deep_size(arguments, self.budget.left) + FIELD_UNITS))

    def _format(self, layout: Any, *args: Any, **kwargs: Any) -> str:
        self._check_format(str(layout), PERCENT_FIELD, "%", [args, kwargs])
        return str(layout) % (kwargs or args)

    def _concat(self, parts: Sequence[Any]) -> str:
        return "".join(self.budget.pay_each(map(str, parts)))

    def _join(self, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        return str(d).join(self.budget.pay_each(map(str, items), extra=len(str(d))))

    @pass_context
    def _map(self, context: Context, items: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self.budget.measured(self.budget.pay_result(FILTERS["map"](context, items, *args, **kwargs)))

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        self.budget.spend(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        margin = len(width) if isinstance(width, str) else int(width)
        self.budget.spend((str(text).count("\n") + 1) * (margin + 1))
        return FILTERS["indent"](str(text), width, first, blank)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,  # as transformers has it, and no HTML escapes either
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=None if indent is None else int(indent),
            separators=separators,
            sort_keys=sort_keys,
        )
        return "".join(self.budget.pay_each(encoder.iterencode(value)))


@pass_context  # which also keeps Jinja from printing constants at compile time
def _print(context: Context, value: Any) -> Any:
    """What every `{{ ... }}` prints passes through here: the output has to be paid for, too."""
    text = value if isinstance(value, str) else str(value)
    context.environment.budget.spend(len(text) + 1)
    return text


def _refuse_large_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"the argument {value:.3e} is larger than {MAX_NUMBER:,}")


def _product_size(left: Any, right: Any) -> int:
    """Units that `left * right` will make."""
    if isinstance(left, int):
        left, right = right, left
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        return deep_size(left, limit=10**9) * max(right, 0)
    return 1


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if not DATE_LAYOUT.fullmatch(layout):
        raise SecurityError(f"the date layout {layout[:60]!r} is longer than 100 or has fields with widths")
    return datetime.now().strftime(layout)


class _Namespace(Namespace):
    """Jinja's `namespace()`, which forgets to refuse names such as `__class__`, and prints all it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: `namespace(self=1)` is allowed
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not hold the private name {name!r}")
