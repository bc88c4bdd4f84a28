"""What a PromQL expression asks for: names of metrics, and what it wants of their labels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FUNCTIONS = frozenset("sum max min avg count rate increase histogram_quantile vector label_values".split())
WORDS = frozenset("by without or and unless on ignoring bool offset".split())


@dataclass(frozen=True)
class Selector:
    """One metric in an expression. `matchers`: label, operator, value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = field(default=())


def selectors(expression: str) -> list[Selector]:
    """Every selector in it. Fails where a word is none of what is known here."""
    text = re.sub(r"\[[^\]]*\]", "", expression)
    text = re.sub(r'\{__name__=~"([^"]*)"\}', lambda names: " or ".join(names[1].split("|")), text)
    text = re.sub(r"\b(by|without)\s*\([^)]*\)", "", text)
    found = []
    for name, braces in re.findall(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(?=[^\"]*(?:\"[^\"]*\"[^\"]*)*$)", text):
        if not braces and name in FUNCTIONS | WORDS:
            continue
        matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', braces)
        found.append(Selector(name, tuple(matchers)))
    return found
