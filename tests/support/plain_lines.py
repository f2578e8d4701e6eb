"""A parser for the plain lines of `minillm.view.plain`."""

from __future__ import annotations

import ast
import re

ITEM = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,'"])+"""


def fields(line: str) -> dict[str, list[str]]:
    """The fields of a plain line, each as a list of its items."""
    found = re.findall(rf"(?:^| )(\w+)=({ITEM}(?:,{ITEM})*)(?= |$)", line)
    assert line.endswith(" ".join(f"{key}={value}" for key, value in found))  # the line holds nothing but fields
    return {key: [] if value == "-" else re.findall(ITEM, value) for key, value in found}


def unquoted(item: str) -> tuple[str, str]:
    """The name at the beginning of an item, and the rest of the item."""
    match = re.match(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(.*)""", item)
    return (ast.literal_eval(match[1]), match[2]) if match else re.match(r"([A-Za-z0-9_.-]*)(.*)", item).groups()
