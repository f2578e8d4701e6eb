"""BudgetedEnvironment: a Jinja environment in which templates cannot reach outside, run for long, or use much memory.

Jinja's immutable sandbox already denies templates access to Python's internals and to files. It does not limit how much
work a template does: `'a' * 10**10`, five nested loops, a string doubled forty times. Three rules limit the work:

1. Syntax that no chat template needs is rejected: tags that load or inherit templates, powers, `varargs`, and integers
   of more than 64 bits.
2. Every rendering has a `Budget`. It is charged for each step and for each character and item produced. An operation
   that can produce a large result from small inputs (`*`, `replace`, `join`, ...) is charged before it runs, because
   afterwards the memory is already in use. The contents of a container are counted when it is built, and containers
   nest at most `MAX_DEPTH` levels deep.
3. Rule 2 keeps every value small, so no single operation on values is slow. Every operation passes through this class,
   and the budget checks the time.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from minillm.tokenizer.sandbox.budget import STEP, Budget, deep_size
from minillm.tokenizer.sandbox.functions import CheckedNamespace, raise_exception, strftime_now
from minillm.tokenizer.sandbox.syntax_tree import ChargingTransformer, GenerationTag

MAX_ARGUMENT = 100_000  # absolute value of an integer argument that can determine a size, such as a width or precision

# The built-in filters that a template may use. The list omits filters that can produce large results from small inputs
# (center, batch, groupby, ...) and filters that no chat template needs (random, urlize, xmlattr, ...).
BUILT_IN_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int"),
    *("items", "last", "length", "list", "lower", "max", "min", "reject", "rejectattr", "reverse", "round", "safe"),
    *("select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
)
SIZED_FILTERS = ("indent", "round", "tojson")  # filters whose integer arguments determine the size of the result

# Methods that can produce large results from small inputs and that no chat template needs.
FORBIDDEN_METHODS = (
    *("changed", "encode", "expandtabs", "format_map", "from_bytes", "fromkeys", "maketrans", "striptags", "to_bytes"),
    *("translate", "unescape"),
)

# Jinja adds these keywords to every call in a loop or a block. `Context.call` removes them again.
HIDDEN_KEYWORDS = ("_loop_vars", "_block_vars")

# Format fields whose widths have at most two digits: `%s`, `%(name)5.2f`, and `{}`, `{name:>5}`.
PERCENT_FIELD = re.compile(r"%(?:\(\w*\))?[-+ #0]*\d{0,2}(?:\.\d{0,2})?[a-zA-Z%]")
BRACE_FIELD = re.compile(r"\{\{|\}\}|\{[\w.]*(?:![rsa])?(?::[<>=^]?[-+ ]?#?,?\d{0,2}(?:\.\d{1,2})?[a-z%]?)?\}")
UNITS_PER_FIELD = 500  # more characters than such a field produces for any number


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers gives to chat templates, with a budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})

    def __init__(self, budget: Budget):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=self._charge_output,
            optimized=False,  # the optimizer would compute constants at compile time, where no budget applies
        )
        self.budget = budget
        # Jinja's `lipsum`, `cycler` and `joiner` are omitted. `dict` is a function, because the type has methods.
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": CheckedNamespace,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        filters: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in BUILT_IN_FILTERS}
        filters |= {"join": self._join, "replace": self._replace, "indent": self._indent, "tojson": self._tojson}
        filters |= {"map": self._map, "format": self._format, "concat": self._concat}
        filters |= {"charge_result": budget.charge_result, "charge_container": budget.charge_container}
        self.filters = {name: self._charged(name, function) for name, function in filters.items()}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: self._charged(name, function) for name, function in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return ChargingTransformer().visit(super()._parse(source, name, filename))

    def charge_iteration(self, units: int) -> None:
        """Charge for one iteration of a loop or one call of a macro, in addition to the call of this method."""
        self.budget.charge(units)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute: Jinja's rule, without `FORBIDDEN_METHODS`."""
        return attr not in FORBIDDEN_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge for a call and make it. Jinja passes every call in a template to this method."""
        self.budget.charge(STEP)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        named = {keyword: value for keyword, value in kwargs.items() if keyword not in HIDDEN_KEYWORDS}
        if isinstance(owner, str):
            if name == "replace":
                return self._replace(owner, *args, **named)
            if name == "join":
                args = tuple(self.budget.charge_each(texts, len(owner)) for texts in args)
            self._charge_search(owner, args)
            _reject_large_numbers([*args, *named.values()])
        elif function is CheckedNamespace or function is self.globals["dict"]:
            self.budget.charge_container([args, named])
        return self.budget.charge_result(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge for an arithmetic operation and compute it."""
        self.budget.charge(STEP)
        if operator == "%" and isinstance(left, str):
            self._charge_format(left, PERCENT_FIELD, "%", right)
        elif operator == "*":
            self.budget.charge(_product_size(left, right))
        elif operator == "+" and isinstance(left, str | list | tuple):
            self.budget.charge_container([left, right])
        return self.budget.charge_result(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return Jinja's safe wrapper of `str.format`, with a check of the format's fields in front."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self._charge_format(value.__self__, BRACE_FIELD, "{", [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or test that charges for its work and its result."""
        # Jinja marks a function that takes the context or the environment as its first argument.
        subject_index = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)  # copies the mark
        def charged(*args: Any, **kwargs: Any) -> Any:
            self.budget.charge(STEP)
            subject, *others = *args[subject_index:], *kwargs.values()
            self._charge_search(subject, others)
            if name in SIZED_FILTERS:
                _reject_large_numbers(others)
            return self.budget.charge_result(function(*args, **kwargs))

        return charged

    def _charge_search(self, subject: Any, arguments: Iterable[Any]) -> None:
        """Charge for work that may combine each item of `subject` with each character of a text argument.

        Searching and stripping compare them. An attribute name such as `"a.b.c"` is resolved for every item. One unit
        pays for 100 combinations.
        """
        if isinstance(subject, Sized):
            self.budget.charge(sum(len(subject) * len(text) // 100 for text in arguments if isinstance(text, str)))

    def _charge_format(self, layout: str, field: re.Pattern[str], opening: str, arguments: Any) -> None:
        """Reject wide fields such as `%0999999999d`, and charge for all arguments once per field."""
        if opening in field.sub("", layout):
            raise SecurityError(f"the format string {layout[:60]!r} has a field that chat templates may not use")
        self.budget.charge(layout.count(opening) * (deep_size(arguments, self.budget.remaining) + UNITS_PER_FIELD))

    def _format(self, layout: Any, *args: Any, **kwargs: Any) -> str:
        self._charge_format(str(layout), PERCENT_FIELD, "%", [args, kwargs])
        return str(layout) % (kwargs or args)

    def _concat(self, parts: Sequence[Any]) -> str:
        return "".join(self.budget.charge_each(map(str, parts)))

    def _join(self, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        return str(d).join(self.budget.charge_each(map(str, items), extra=len(str(d))))

    @pass_context
    def _map(self, context: Context, items: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        mapped = FILTERS["map"](context, items, *args, **kwargs)
        return self.budget.charge_container(self.budget.charge_result(mapped))

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        self.budget.charge(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        margin = len(width) if isinstance(width, str) else int(width)
        self.budget.charge((str(text).count("\n") + 1) * (margin + 1))
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

    @pass_context  # a function of the context also keeps Jinja from printing constants at compile time
    def _charge_output(self, context: Context, value: Any) -> str:
        """Charge for the text that `{{ ... }}` prints, and return it."""
        text = value if isinstance(value, str) else str(value)
        self.budget.charge(len(text) + 1)
        return text


def _reject_large_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
            raise SecurityError(f"expected an argument from -{MAX_ARGUMENT:,} to {MAX_ARGUMENT:,}, got {value:.3e}")


def _product_size(left: Any, right: Any) -> int:
    """Return the units that computing `left * right` costs."""
    if isinstance(left, int):
        left, right = right, left
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        return deep_size(left, limit=10**9) * max(right, 0)
    return 1
