"""The sandbox chat templates run in, where every step and every character is paid for.

Jinja's immutable sandbox already keeps a template away from Python's internals and from files. What it does
not limit is *how much* a template does: `'a' * 10**10`, five nested loops, a string doubled forty times. So a
rendering gets a `Budget`, and one that has used it up is stopped with a `SecurityError`.

The payment is made *before* the work wherever one operation can make much out of little (`*`, `**`,
`replace`, `join`, `~`, ...), because afterwards the memory is already gone.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

STEP = 10  # units a loop round or a call costs
MAX_SECONDS = 5.0  # the last resort, against slow operations that the units do not price well
MAX_NUMBER = 100_000  # largest integer argument of a call or filter: widths, precisions, ranges

# The built-in filters a template may use. Left out are those that can make much out of little
# (center, batch, sum, ...) and those that no text needs (random, urlize, xmlattr, ...).
PLAIN_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby"),
    *("int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
    *("reverse", "round", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
)

# Methods whose result may be far larger than their arguments, and that no chat template needs.
REFUSED_METHODS = {"encode", "expandtabs", "format_map", "fromkeys", "to_bytes", "translate"}

# `%s`, `%(name)5.2f` and `{}`, `{name:>5}`: formats whose widths have at most three digits.
PERCENT_FIELD = re.compile(r"%(?:\(\w*\))?[-+ #0]*\d{0,3}(?:\.\d{0,3})?[a-zA-Z%]")
BRACE_FIELD = re.compile(r"\{\{|\}\}|\{[\w.]*(?:![rsa])?(?::[<>=^]?[-+ ]?#?,?\d{0,3}(?:\.\d{1,3})?[a-z%]?)?\}")


class Budget:
    """What a rendering may still spend: units of work, and seconds on the clock."""

    def __init__(self, units: int):
        self.units = self.left = units
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, units: int) -> None:
        """Pay, or raise `SecurityError`."""
        self.left -= units
        if self.left < 0:
            raise SecurityError(f"stopped: it loops too often or makes too much text (more than {self.units:,} units)")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"stopped: still running after {MAX_SECONDS:g} s")

    def pay_each(self, texts: Iterable[str], extra: int = 0) -> Iterator[str]:
        """`texts` again, each paid for by its length (plus `extra`) as it passes."""
        for text in texts:
            self.spend(len(text) + extra)
            yield text

    def pay_result(self, result: Any) -> Any:
        """`result`, paid for by its length; an iterator becomes a list.

        Lazy results would move work out of sight, to whoever reads them later.
        """
        if isinstance(result, str | list | tuple | dict):
            self.spend(len(result))
        elif isinstance(result, Iterator):
            items = []
            for item in result:
                self.spend(STEP)
                items.append(item)
            return items
        return result

    def pay_deep(self, value: Any) -> Any:
        """`value`, paid for by everything inside it.

        Done where a container is put together. Without it, `x = [x, x]` repeated forty times is a small
        object that takes 2^40 steps to print or to compare.
        """
        self.spend(deep_size(value, self.left))
        return value


def deep_size(value: Any, limit: int) -> int:
    """Characters and items in nested containers, counting a shared part each time; stops beyond `limit`."""
    size, waiting = 0, [value]
    while waiting and size <= limit:
        item = waiting.pop()
        size += len(item) + 1 if isinstance(item, str) else 1
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
    return size


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment templates are written for (that of transformers), with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
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
            "strftime_now": lambda layout: datetime.now().strftime(layout),
        }
        own = {"join": self._join, "replace": self._replace, "indent": self._indent, "tojson": self._tojson}
        own |= {"format": self._format, "made": budget.pay_result, "container": budget.pay_deep, "concat": self._concat}
        self.filters = {name: self._paid(FILTERS[name]) for name in PLAIN_FILTERS}
        self.filters |= {name: self._paid(function) for name, function in own.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metered().visit(super()._parse(source, name, filename))

    def step(self, text: int) -> None:
        """What `_Metered` has every loop round and macro call pay, besides the call itself."""
        self.budget.spend(text)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rule, less the methods that blow text up."""
        return attr not in REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes through here."""
        self.budget.spend(STEP)
        if function != self.step:  # whose argument is ours
            _refuse_large_numbers(args, kwargs)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        if isinstance(owner, str) and name == "join":
            args = (self.budget.pay_each(*args, extra=len(owner)),)
        elif isinstance(owner, str) and name == "replace":
            return self._replace(owner, *args, **kwargs)
        elif function is _Namespace or function is self.globals["dict"]:
            self.budget.pay_deep([args, kwargs])
        return self.budget.pay_result(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %` come through here, before they are computed."""
        if operator == "%" and isinstance(left, str):
            self._check_format(left, PERCENT_FIELD, "%", right)
        elif operator in ("*", "**"):
            self.budget.spend(_product_size(operator, left, right))
        elif operator == "+" and isinstance(left, str | list | tuple):
            self.budget.spend(deep_size([left, right], self.budget.left))
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

    def _paid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # also carries over Jinja's mark "wants the environment first"
        def paid(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(STEP)
            subject = 1 + hasattr(function, "jinja_pass_arg")  # what the filter is applied to may be any number
            _refuse_large_numbers(args[subject:], kwargs)
            return self.budget.pay_result(function(*args, **kwargs))

        return paid

    def _check_format(self, layout: str, field: re.Pattern[str], opening: str, arguments: Any) -> None:
        """Refuse wide fields such as `%0999999999d`, and pay for the arguments once for each field."""
        if opening in field.sub("", layout):
            raise SecurityError(f"the format {layout[:60]!r} has a field that chat templates may not use")
        self.budget.spend(layout.count(opening) * deep_size(arguments, self.budget.left))

    def _format(self, layout: Any, *args: Any, **kwargs: Any) -> str:
        self._check_format(str(layout), PERCENT_FIELD, "%", [args, kwargs])
        return str(layout) % (kwargs or args)

    def _concat(self, parts: Sequence[Any]) -> str:
        return "".join(self.budget.pay_each(map(str, parts)))

    def _join(self, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        return str(d).join(self.budget.pay_each(map(str, items), extra=len(str(d))))

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
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return "".join(self.budget.pay_each(encoder.iterencode(value)))


@pass_context  # which also keeps Jinja from printing constants at compile time
def _print(context: Context, value: Any) -> Any:
    """What every `{{ ... }}` prints passes through here: the output has to be paid for, too."""
    text = value if isinstance(value, str) else str(value)
    context.environment.budget.spend(len(text) + 1)
    return text


def _refuse_large_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"the argument {value:.3e} is larger than {MAX_NUMBER:,}")


def _product_size(operator: str, left: Any, right: Any) -> int:
    """Units that `left * right` or `left ** right` will make."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return bits // 8
    if isinstance(left, int):
        left, right = right, left
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        return deep_size(left, limit=10**9) * max(right, 0)
    return 1


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


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


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; when generating it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way of declaring it

    def parse(self, parser: Any) -> nodes.Node:
        """The statements up to `endgeneration`, in a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Metered(NodeTransformer):
    """Rewrites a parsed template so that what Jinja does by itself is paid for as well."""

    def _step(self, node: Any) -> nodes.Node:
        """Begin the body of a loop or macro with a call that pays for the literal text in it."""
        self.generic_visit(node)
        literals = [*node.find_all(nodes.TemplateData), *node.find_all(nodes.Const)]
        cost = nodes.Const(
            1 + sum(len(text) for literal in literals if isinstance(text := _literal_text(literal), str))
        )
        pay = nodes.Call(nodes.EnvironmentAttribute("step"), [cost], [], None, None)
        node.body.insert(0, nodes.ExprStmt(pay).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _step

    def _container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, "container")

    visit_List = visit_Tuple = visit_Dict = _container

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b`: joined by a filter that pays first."""
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """`a[1:]` is a copy."""
        self.generic_visit(node)
        return _filtered(node, "made") if isinstance(node.arg, nodes.Slice) else node


def _literal_text(node: Any) -> object:
    """What stands in the template itself: the text between the tags, or a constant's value."""
    return node.data if isinstance(node, nodes.TemplateData) else node.value


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
