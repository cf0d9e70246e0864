"""One HTML page, light or dark as the reader's system is; nothing is loaded from anywhere."""

from __future__ import annotations

from html import escape


def page(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page around `body`, with rules and a script of its own."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_STYLE}
{style}
</style>
</head>
<body>
<main>
{body}
</main>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


_STYLE = """
:root { --paper: #fbfbf9; --card: #ffffff; --ink: #1b1c1e; --soft: #5d6167; --rule: #e3e3de; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #131416; --card: #1b1d20; --ink: #ebecee; --soft: #a0a5ad; --rule: #31343a; }
}
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 1264px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 1.25rem; margin: 40px 0 2px; }
h3 { font-size: 1rem; margin: 0 0 2px; }
.note { color: var(--soft); font-size: 0.85rem; margin: 0 0 10px; max-width: 110ch; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
@media (max-width: 760px) {
  main { padding: 20px 16px 40px; }
  h1 { font-size: 1.4rem; }
}
""".strip()
