"""The sandbox for data from model files that could do harm: chat templates, which are programs, and tokenizer steps.

environment.py   the Jinja environment that renders templates within a budget
budget.py        the work and the time that a rendering may spend
syntax_tree.py   checks a template's syntax tree and inserts calls that charge the budget
expansion.py     limits how much longer the steps of a `tokenizer.json` can make a text
"""

from minillm.tokenizer.sandbox.budget import Budget, deep_size
from minillm.tokenizer.sandbox.environment import Sandbox
from minillm.tokenizer.sandbox.expansion import check_expansion

__all__ = ["Budget", "Sandbox", "check_expansion", "deep_size"]
