"""The page at /: one self-contained document, put together from the parts in `dashboard`.

Owns its content security policy. The page may run this script, use this style (both by digest) and fetch from this
server; it may load nothing else, and no other page may frame it or read from it. Injected code would not run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

SCRIPTS: Final = ("format.js", "nodes.js", "charts.js", "memory.js", "requests.js", "main.js")
"""Concatenated in this order: later parts use earlier ones."""
PRIVATE: Final[Mapping[str, str]] = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_POLICY: Final = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def load() -> tuple[bytes, dict[str, str]]:
    """The document and its headers."""
    style = _part("style.css")
    script = '"use strict";\n' + "".join(_part(name) for name in SCRIPTS)
    document = _part("page.html").replace("/* STYLE */", style).replace("/* SCRIPT */", script)
    policy = _POLICY.format(script=_digest(script), style=_digest(style))
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
    return document.encode(), {**headers, **PRIVATE}


def _part(name: str) -> str:
    return (files("stowage.server") / "dashboard" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
