"""The Jinja environment for chat templates: it grants no access to the outside, little time and little memory.

Jinja's immutable sandbox already denies templates access to Python's internals and to files. It does not limit *how
much* a template computes: `'a' * 10**10`, five nested loops, a string doubled forty times. Three rules add this:

1. Features that no chat template needs are rejected: tags that load or inherit, powers, `varargs`, numbers beyond 64
   bits.
2. A rendering has a `Budget`. Each step, and each character and item created, is charged to it. Operations that can
   make large results from small inputs (`*`, `replace`, `join`, ...) are charged *before* they run, because afterwards
   the memory is already allocated. The contents of a container are counted when it is built, and containers nest at
   most `MAX_DEPTH` levels.
3. Rule 2 keeps every value small, so no single operation is slow. Every operation passes through this class and checks
   the time.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from minillm.tokenizer.sandbox.budget import STEP, Budget, deep_size
from minillm.tokenizer.sandbox.syntax_tree import BudgetedSyntaxTree, GenerationTag

MAX_NUMBER = 100_000  # largest integer argument of string methods and of filters that pad: widths, precisions

# The built-in filters that a template may use. The list omits filters that can make large results from small inputs
# (center, batch, groupby, ...) and filters that no chat template needs (random, urlize, xmlattr, ...).
ALLOWED_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int"),
    *("items", "last", "length", "list", "lower", "max", "min", "reject", "rejectattr", "reverse", "round", "safe"),
    *("select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
)
SIZING_FILTERS = ("indent", "round", "tojson")  # filters whose numeric arguments determine the size of the result

# Methods that can make large results from small inputs and that no chat template needs.
FORBIDDEN_METHODS = (
    *("changed", "encode", "expandtabs", "format_map", "from_bytes", "fromkeys", "maketrans", "striptags", "to_bytes"),
    *("translate", "unescape"),
)

# Format fields such as `%s`, `%(name)5.2f`, `{}` and `{name:>5}`, whose widths have at most two digits.
PERCENT_FIELD = re.compile(r"%(?:\(\w*\))?[-+ #0]*\d{0,2}(?:\.\d{0,2})?[a-zA-Z%]")
BRACE_FIELD = re.compile(r"\{\{|\}\}|\{[\w.]*(?:![rsa])?(?::[<>=^]?[-+ ]?#?,?\d{0,2}(?:\.\d{1,2})?[a-z%]?)?\}")
FIELD_UNITS = 500  # more characters than any such field makes from a number
DATE_LAYOUT = re.compile(r"(?:[^%]|%-?[a-zA-Z%]){0,100}", re.DOTALL)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of the transformers library, for which templates are written, with a budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})

    def __init__(self, budget: Budget):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=_charge_output,
            optimized=False,  # evaluate nothing at compile time, which no budget covers
        )
        self.budget = budget
        # Jinja's lipsum, cycler and joiner are left out. `dict` is a function because the type has methods.
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        filters: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in ALLOWED_FILTERS}
        filters |= {"join": self._join, "replace": self._replace, "indent": self._indent, "tojson": self._tojson}
        filters |= {"map": self._map, "format": self._format, "charge_result": budget.charge_result}
        filters |= {"check_size": budget.check_size, "concat": self._concat}
        self.filters = {name: self._charged(name, function) for name, function in filters.items()}
        # Jinja's own annotation of its tests is the type `function`, hence the cast.
        tests = cast(dict[str, Callable[..., Any]], self.tests)
        self.tests = {name: self._charged(name, function) for name, function in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = BudgetedSyntaxTree().visit(super()._parse(source, name, filename))
        return tree

    def step(self, units: int) -> None:
        """Charge `units`. `BudgetedSyntaxTree` inserts a call of this method into every loop and macro body."""
        self.budget.spend(units)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may access an attribute: Jinja's rule, minus `FORBIDDEN_METHODS`."""
        return attr not in FORBIDDEN_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` and charge for it. Jinja routes every call in a template through this method."""
        self.budget.spend(STEP)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        if isinstance(owner, str):
            if name == "replace":
                return self._replace(owner, *args, **kwargs)
            if name == "join" and args:
                args = (self.budget.charge_each(args[0], len(owner)), *args[1:])
            self._charge_search(owner, args)
            _check_numbers([*args, *kwargs.values()])
        elif function is _Namespace or function is self.globals["dict"]:
            self.budget.check_size([args, kwargs])
        return self.budget.charge_result(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge for an arithmetic operation, then compute it. Jinja routes all of them through this method."""
        self.budget.spend(STEP)
        if operator == "%" and isinstance(left, str):
            self._check_format(left, PERCENT_FIELD, "%", right)
        elif operator == "*":
            self.budget.spend(_product_size(left, right))
        elif operator == "+" and isinstance(left, str | list | tuple):
            self.budget.check_size([left, right])
        return self.budget.charge_result(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return Jinja's sandboxed `str.format`, extended by a check of the format's fields."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, BRACE_FIELD, "{", [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or test that charges the budget."""
        first = int(hasattr(function, "jinja_pass_arg"))  # Jinja's mark: the first argument is the environment

        @functools.wraps(function)  # copies the mark
        def charged(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(STEP)
            subject, *others = *args[first:], *kwargs.values()
            self._charge_search(subject, others)
            if name in SIZING_FILTERS:
                _check_numbers(others)
            return self.budget.charge_result(function(*args, **kwargs))

        return charged

    def _charge_search(self, subject: Any, wanted: Iterable[Any]) -> None:
        """Charge for comparing each character or item of `subject` with each character of `wanted`: 100 per unit.

        Stripping and searching compare characters; an attribute path such as `"a.b.c"` is followed for every item.
        """
        if isinstance(subject, Sized):
            self.budget.spend(sum(len(subject) * len(other) // 100 for other in wanted if isinstance(other, str)))

    def _check_format(self, layout: str, field: re.Pattern[str], opening: str, arguments: Any) -> None:
        """Reject wide fields such as `%0999999999d`, and charge for the arguments once per field."""
        if opening in field.sub("", layout):
            raise SecurityError(
                f"the format {layout[:60]!r} has a field that chat templates may not use; use at most two digits"
            )
        self.budget.spend(layout.count(opening) * (deep_size(arguments, self.budget.left) + FIELD_UNITS))

    def _format(self, layout: Any, *args: Any, **kwargs: Any) -> str:
        self._check_format(str(layout), PERCENT_FIELD, "%", [args, kwargs])
        return str(layout) % (kwargs or args)

    def _concat(self, parts: Sequence[Any]) -> str:
        return "".join(self.budget.charge_each(map(str, parts)))

    def _join(self, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        return str(d).join(self.budget.charge_each(map(str, items), extra=len(str(d))))

    @pass_context
    def _map(self, context: Context, items: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self.budget.check_size(self.budget.charge_result(FILTERS["map"](context, items, *args, **kwargs)))

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
        ensure_ascii: bool = False,  # the default of transformers, which does not escape HTML either
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
        return "".join(self.budget.charge_each(encoder.iterencode(value)))


@pass_context  # this also keeps Jinja from printing constants at compile time
def _charge_output(context: Context, value: Any) -> Any:
    """Convert the value of a `{{ ... }}` to text and charge for it."""
    text = value if isinstance(value, str) else str(value)
    cast(Sandbox, context.environment).budget.spend(len(text) + 1)
    return text


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"the argument {value:.3e} is larger than {MAX_NUMBER:,}")


def _product_size(left: Any, right: Any) -> int:
    """Return the size of `left * right` in units."""
    if isinstance(left, int):
        left, right = right, left
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        return deep_size(left, limit=10**9) * max(right, 0)
    return 1


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if not DATE_LAYOUT.fullmatch(layout):
        raise SecurityError(
            f"the date layout {layout[:60]!r} has more than 100 characters and fields, or a field with a width"
        )
    return datetime.now().strftime(layout)


class _Namespace(Namespace):
    """Jinja's `namespace()` with two fixes: it rejects names such as `__class__`, and its repr omits its contents."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: `namespace(self=1)` is allowed
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _reject_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _reject_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _reject_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not hold the private name {name!r}")
