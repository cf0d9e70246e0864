"""The page at `/`, which streams answers and colours every token by its source."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

from draftsmith import html

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}
"""Headers that allow the page to contact its own server only."""

_KEY = '<label>API key <input id="key" type="password" autocomplete="off"></label>'
_PARTS = re.compile(r"<style>(.*)</style>\n(.*)<script>\n(.*)</script>\n", re.DOTALL)


def page(model: str, chat: bool, keys: bool) -> str:
    """Return the page. `chat`: whether there is a chat template. `keys`: whether keys are used."""
    found = _PARTS.fullmatch(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    assert found is not None
    style, body, script = found.groups()
    body = body.replace("KEY", _KEY if keys else "").replace("MODEL", escape(model))
    settings = json.dumps({"chat": chat}).replace("<", "\\u003c")
    return html.page("draftsmith", body, style, f"const settings = {settings};\n{script}")
