"""Checks and rewrites the syntax tree of a chat template before it is compiled.

Syntax that no chat template needs is rejected. Some of Jinja's operations do not pass through the sandbox, such as a
slice, a comparison, or building a list. For these, calls that charge the budget are inserted into the tree: the filters
`charge_result`, `charge_container` and `concat`, and the environment's method `charge_iteration`.
"""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

from minillm.tokenizer.sandbox.budget import MAX_INTEGER

MAX_NODES = 10_000  # nodes in a template's syntax tree; compiling takes 40 µs and 10 kB per node

# Statements that a template may use. `block`, `call`, and the tags that load other templates are excluded.
ALLOWED_STATEMENTS = (
    *(nodes.Output, nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Macro, nodes.Assign, nodes.AssignBlock),
    *(nodes.FilterBlock, nodes.With, nodes.Scope, nodes.ExprStmt),
)
# Jinja's special names with which a template could build uncharged values or call itself.
FORBIDDEN_NAMES = ("varargs", "kwargs", "caller", "self")


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. It has no effect on rendering."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares this attribute as a set

    def parse(self, parser: Any) -> nodes.Node:
        """Return the statements up to `endgeneration`, in a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChargingTransformer(NodeTransformer):
    """Rejects forbidden syntax, and inserts calls that charge for operations that do not pass through the sandbox."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Check a node and rewrite it. Every node of the template passes through this method."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _syntax_error(node, f"may have at most {MAX_NODES:,} nodes in its syntax tree")
        if isinstance(node, nodes.Pow) or (isinstance(node, nodes.Stmt) and not isinstance(node, ALLOWED_STATEMENTS)):
            raise _syntax_error(node, f"may not use {type(node).__name__}")
        return super().visit(node, *args, **kwargs)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        """Check the name of a variable."""
        if node.name in FORBIDDEN_NAMES:
            raise _syntax_error(node, f"may not use the name {node.name!r}")
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """Check a literal."""
        if isinstance(node.value, int) and node.value >= MAX_INTEGER:
            raise _syntax_error(node, "may not use integers of more than 64 bits")
        return node

    def _charge_iteration(self, node: Any) -> nodes.Node:
        """Start the body of a loop or macro with a call that charges for the literal text in it."""
        self.generic_visit(node)
        literals = [*node.find_all(nodes.TemplateData), *node.find_all(nodes.Const)]
        texts = [literal.data if isinstance(literal, nodes.TemplateData) else literal.value for literal in literals]
        cost = nodes.Const(1 + sum(len(text) for text in texts if isinstance(text, str)))
        charge = nodes.Call(nodes.EnvironmentAttribute("charge_iteration"), [cost], [], None, None)
        node.body.insert(0, nodes.ExprStmt(charge).set_lineno(node.lineno))
        return node

    visit_Macro = _charge_iteration

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Charge for a loop, including the values that it skips in `for a in b if c`."""
        self._charge_iteration(node)
        node.iter = _filtered(node.iter, "charge_result")
        return node

    def _charge_container(self, node: Any) -> nodes.Node:
        """Charge for a list, tuple or dict, unless it is the target of an assignment."""
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, "charge_container")

    visit_List = visit_Tuple = visit_Dict = _charge_container

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b` by a filter that charges before it joins."""
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charge for the copy that `a[1:]` makes and for the hash that `a[b]` computes."""
        self.generic_visit(node)
        return node if isinstance(node.arg, nodes.Const) else _filtered(node, "charge_result")

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        """Charge for the right side of a comparison."""
        self.generic_visit(node)
        node.expr = _charged_unless_constant(node.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Charge for hashing the key of a dict entry."""
        self.generic_visit(node)
        node.key = _charged_unless_constant(node.key)
        return node


def _syntax_error(node: nodes.Node, reason: str) -> jinja2.TemplateSyntaxError:
    return jinja2.TemplateSyntaxError(f"a chat template {reason}", node.lineno)


def _charged_unless_constant(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "charge_result")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
