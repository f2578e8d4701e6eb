"""The sandbox for model files: protects against hostile chat templates, which are programs, and tokenizer steps.

budget.py        the work and the CPU time that a rendering of a template may use
environment.py   the Jinja environment, in which every operation is charged to a budget
functions.py     the functions that a template can call
syntax_tree.py   checks a template's syntax tree, and inserts calls that charge the budget
expansion.py     limits how much longer the steps of a `tokenizer.json` can make a text
"""

from minillm.tokenizer.sandbox.budget import Budget, deep_size
from minillm.tokenizer.sandbox.environment import BudgetedEnvironment
from minillm.tokenizer.sandbox.expansion import check_expansion

__all__ = ["Budget", "BudgetedEnvironment", "check_expansion", "deep_size"]
