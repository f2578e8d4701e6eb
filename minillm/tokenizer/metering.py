"""What a chat template is made of: its syntax tree, checked and rewritten before it is compiled.

What no chat template needs is refused, and where Jinja would work without anybody noticing (a slice, a comparison,
a list put together), a call is put into the tree that lets the sandbox see it: the filters `made`, `container` and
`concat`, and the environment's `step`.
"""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

MAX_NODES = 10_000  # nodes of a template's syntax tree: compiling takes 40 µs and 10 kB for each
MAX_INTEGER = 2**64

# Tags a template may use. Left out are those that read other templates, and `block` and `call`.
TAGS = (
    *(nodes.Output, nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Macro, nodes.Assign, nodes.AssignBlock),
    *(nodes.FilterBlock, nodes.With, nodes.Scope, nodes.ExprStmt),
)
# Names Jinja gives a meaning that would let values grow behind the budget's back, or a template call itself.
REFUSED_NAMES = ("varargs", "kwargs", "caller", "self")


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; when generating it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way of declaring it

    def parse(self, parser: Any) -> nodes.Node:
        """The statements up to `endgeneration`, in a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Metered(NodeTransformer):
    """Refuses what a template may not use, and has what Jinja does by itself pay as well."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Every node of the parsed template comes through here."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _refusal(node, f"is too long: more than {MAX_NODES:,} words and signs")
        if isinstance(node, nodes.Pow) or (isinstance(node, nodes.Stmt) and not isinstance(node, TAGS)):
            raise _refusal(node, f"may not use {type(node).__name__}")
        return super().visit(node, *args, **kwargs)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        """A variable."""
        if node.name in REFUSED_NAMES:
            raise _refusal(node, f"may not use the name {node.name!r}")
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """A number or text in the template."""
        if isinstance(node.value, int) and node.value >= MAX_INTEGER:
            raise _refusal(node, "may not use integers of more than 64 bits")
        return node

    def _step(self, node: Any) -> nodes.Node:
        """Begin the body of a loop or macro with a call that pays for the literal text in it."""
        self.generic_visit(node)
        literals = [*node.find_all(nodes.TemplateData), *node.find_all(nodes.Const)]
        texts = [literal.data if isinstance(literal, nodes.TemplateData) else literal.value for literal in literals]
        cost = nodes.Const(1 + sum(len(text) for text in texts if isinstance(text, str)))
        pay = nodes.Call(nodes.EnvironmentAttribute("step"), [cost], [], None, None)
        node.body.insert(0, nodes.ExprStmt(pay).set_lineno(node.lineno))
        return node

    visit_Macro = _step

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A loop, and the values it skips (`for a in b if c`)."""
        self._step(node)
        node.iter = _filtered(node.iter, "made")
        return node

    def _container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, "container")

    visit_List = visit_Tuple = visit_Dict = _container

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b`: joined by a filter that pays first."""
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """`a[1:]` is a copy, `a[b]` hashes."""
        self.generic_visit(node)
        return node if isinstance(node.arg, nodes.Const) else _filtered(node, "made")

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        """The right side of a comparison."""
        self.generic_visit(node)
        node.expr = _unless_constant(node.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """`key: value` in a dict; the key gets hashed."""
        self.generic_visit(node)
        node.key = _unless_constant(node.key)
        return node


def _refusal(node: nodes.Node, what: str) -> jinja2.TemplateSyntaxError:
    return jinja2.TemplateSyntaxError(f"a chat template {what}", node.lineno)


def _unless_constant(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "made")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
