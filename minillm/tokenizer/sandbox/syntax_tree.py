"""Check and rewrite the syntax tree of a chat template before it is compiled.

Features that no chat template needs are rejected. Some of Jinja's operations (a slice, a comparison, building a list)
do not pass through the sandbox. For these, calls that charge the budget are inserted into the tree: the filters
`charge_result`, `check_size` and `concat`, and the environment's method `step`.
"""

from __future__ import annotations

from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

MAX_NODES = 10_000  # nodes of a template's syntax tree; compiling takes 40 µs and 10 kB per node
MAX_INTEGER = 2**64

# Tags that a template may use. Tags that read other templates are excluded, as are `block` and `call`.
TAGS = (
    *(nodes.Output, nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Macro, nodes.Assign, nodes.AssignBlock),
    *(nodes.FilterBlock, nodes.With, nodes.Scope, nodes.ExprStmt),
)
# Names with a special meaning in Jinja, which would let values grow uncharged or a template call itself.
FORBIDDEN_NAMES = ("varargs", "kwargs", "caller", "self")


class GenerationTag(Extension):
    """The tag `{% generation %}`: it marks the assistant's text for training and does not change the rendered text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a mutable class attribute

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the statements up to `endgeneration` into a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class BudgetedSyntaxTree(NodeTransformer):
    """Rejects forbidden features and inserts calls that charge the budget."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Transform one node of the parsed template, after the checks that apply to every node."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _rejection(node, f"is too long: expected at most {MAX_NODES:,} syntax nodes")
        if isinstance(node, nodes.Pow) or (isinstance(node, nodes.Stmt) and not isinstance(node, TAGS)):
            raise _rejection(node, f"may not use {type(node).__name__}")
        return super().visit(node, *args, **kwargs)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        """Check the name of a variable."""
        if node.name in FORBIDDEN_NAMES:
            raise _rejection(node, f"may not use the name {node.name!r}")
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """Check the size of an integer constant."""
        if isinstance(node.value, int) and node.value >= MAX_INTEGER:
            raise _rejection(node, "may not use integers of more than 64 bits")
        return node

    def _step(self, node: Any) -> nodes.Node:
        """Insert a call at the start of a loop or macro body that charges for the body's literal text."""
        self.generic_visit(node)
        literals = [*node.find_all(nodes.TemplateData), *node.find_all(nodes.Const)]
        texts = [literal.data if isinstance(literal, nodes.TemplateData) else literal.value for literal in literals]
        cost = nodes.Const(1 + sum(len(text) for text in texts if isinstance(text, str)))
        charge = nodes.Call(nodes.EnvironmentAttribute("step"), [cost], [], None, None)
        node.body.insert(0, nodes.ExprStmt(charge).set_lineno(node.lineno))
        return node

    visit_Macro = _step

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Charge for each iteration of a loop and for its values, including those that `for a in b if c` skips."""
        self._step(node)
        node.iter = _filtered(
            cast(nodes.Expr, node.iter), "charge_result"
        )  # Jinja annotates it as Node; the parser makes an Expr
        return node

    def _container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, "check_size")

    visit_List = visit_Tuple = visit_Dict = _container

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b` by a filter that charges before it joins."""
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charge for a subscript: `a[1:]` copies, and `a[b]` hashes `b`."""
        self.generic_visit(node)
        return node if isinstance(node.arg, nodes.Const) else _filtered(node, "charge_result")

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        """Charge for the right side of a comparison."""
        self.generic_visit(node)
        node.expr = _unless_constant(node.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Charge for the key of `key: value` in a dict, because it is hashed."""
        self.generic_visit(node)
        node.key = _unless_constant(node.key)
        return node


def _rejection(node: nodes.Node, reason: str) -> jinja2.TemplateSyntaxError:
    return jinja2.TemplateSyntaxError(f"a chat template {reason}", node.lineno)


def _unless_constant(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "charge_result")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
