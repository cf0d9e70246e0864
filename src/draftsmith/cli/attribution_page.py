"""A page that shows an answer beside its prompt; pointing at a copy lights up its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from draftsmith import html
from draftsmith.cli.render import plural, visible

if TYPE_CHECKING:
    from draftsmith.engine.attribution import Copy

_FIRST_HUE, _LAST_HUE = 205, -35
"""From blue over green and yellow to pink, in degrees."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Content of the page for one answer."""

    prompt: Sequence[str]
    """Text of each token."""
    output: Sequence[str]
    copies: Sequence[Copy]

    def hue(self, start: int, end: int) -> int | None:
        """The colour of a place in degrees; None: it lies in the answer."""
        if start >= len(self.prompt):
            return None
        middle = min(1.0, (start + end) / 2 / len(self.prompt))
        return round(_FIRST_HUE + middle * (_LAST_HUE - _FIRST_HUE)) % 360


def page(answers: Sequence[Answer], model: str, drafter: str) -> str:
    """The whole page."""
    title = "Where the answer came from" if len(answers) == 1 else "Where the answers came from"
    sections = "\n".join(_section(answer, n, len(answers)) for n, answer in enumerate(answers, 1))
    body = f"""<h1>{title}</h1>
<p class="note">{escape(model)} · {escape(drafter)}</p>
{sections}
<p class="note">Point at a coloured passage of the answer to see its source, or at a source to see
what was made of it. A colour is a place in the prompt; grey was copied from the answer.</p>"""
    return html.page(title, body, _STYLE, _SCRIPT)


def _section(answer: Answer, number: int, count: int) -> str:
    copied = sum(copy.output.end - copy.output.start for copy in answer.copies)
    summary = (
        f"{copied} of {len(answer.output)} tokens copied, in {plural(len(answer.copies), 'span')}"
    )
    heading = f"<h2>Answer {number} of {count}</h2>" if count > 1 else ""
    begin, end = len(answer.prompt), len(answer.prompt) + len(answer.output)
    panes = {"Answer": _marked(answer, begin, end), "Prompt": _marked(answer, 0, begin)}
    boxes = "\n".join(
        f'<section class="card"><h3>{name}</h3>\n'
        f'<div class="text" tabindex="0" role="group" aria-label="{name}">{text}</div></section>'
        for name, text in panes.items()
    )
    return f'{heading}<p class="summary">{summary}</p>\n<div class="pair">\n{boxes}\n</div>'


def _marked(answer: Answer, begin: int, end: int) -> str:
    """The text of the positions `begin` to `end - 1`, cut wherever a copy or a source ends."""
    edges = {edge for copy in answer.copies for span in copy for edge in span}
    cuts = sorted({begin, end, *(edge for edge in edges if begin < edge < end)})
    texts = [*answer.prompt, *answer.output]
    return "".join(
        _piece(answer, start, stop, "".join(texts[start:stop])) for start, stop in pairwise(cuts)
    )


def _piece(answer: Answer, start: int, stop: int, text: str) -> str:
    """A text that is, as a whole, part of the same copy and the source of the same copies."""
    shown = escape(visible(text))
    made = next((n for n, copy in enumerate(answer.copies) if start in range(*copy.output)), None)
    sources = [n for n, copy in enumerate(answer.copies) if start in range(*copy.source)]
    if made is None and not sources:
        return shown
    place = (start, stop) if made is None else answer.copies[made].source
    colour = answer.hue(*place)
    attributes = ['class="own"' if colour is None else f'style="--h:{colour}"']
    if made is not None:
        where = "answer" if colour is None else "prompt"
        origin = f"copied from the {where}, tokens {place[0]}–{place[1] - 1}"
        attributes += [f'data-copy="{made}"', f'title="{origin}"', 'tabindex="0"']
    if sources:
        attributes.append('data-source="{}"'.format(" ".join(map(str, sources))))
    return f"<span {' '.join(attributes)}>{shown}</span>"


_STYLE = """
:root { --tint: 88%; --lit: 70%; --line: 52%; --strength: 78%; }
@media (prefers-color-scheme: dark) {
  :root { --tint: 21%; --lit: 36%; --line: 55%; --strength: 48%; }
}
main { max-width: 1400px; }
h3 { font-size: 0.8rem; font-weight: 600; color: var(--soft); margin: 0; padding: 10px 16px;
  border-bottom: 1px solid var(--rule); }
.note { margin: 0; overflow-wrap: anywhere; }
.summary { font-size: 1.05rem; margin: 14px 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 20px; margin: 0 0 18px; }
.card { overflow: hidden; min-width: 0; }
.text { padding: 14px 16px; white-space: pre-wrap; overflow-wrap: anywhere; overflow-y: auto;
  position: relative; max-height: calc(100vh - 230px); min-height: 8em;
  font: 13.5px/1.7 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.text span { --s: var(--strength); border-radius: 3px; transition: background-color 0.12s;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.text .own { --h: 0; --s: 0%; }
[data-copy] { background: hsl(var(--h) var(--s) var(--tint)); padding: 2px 0; cursor: default; }
.text [data-source]:not([data-copy]) { padding: 2px 0; border-radius: 0;
  box-shadow: inset 0 -2px hsl(var(--h) var(--s) var(--line)); }
.text span:focus-visible { outline: 2px solid hsl(var(--h) var(--s) var(--line)); }
.text span.lit { background: hsl(var(--h) var(--s) var(--lit)); }
@media (max-width: 760px) {
  .pair { grid-template-columns: 1fr; gap: 14px; }
  .text { max-height: 44vh; }
}
"""

_SCRIPT = """
for (const pair of document.querySelectorAll(".pair")) {
  const show = event => {
    const at = event.target.closest("[data-copy], [data-source]");
    for (const old of pair.querySelectorAll(".lit")) old.classList.remove("lit");
    if (!at) return;
    const numbers = at.dataset.copy !== undefined ? [at.dataset.copy]
      : at.dataset.source.split(" ");
    const here = at.closest(".text");
    const moved = new Set([here]);
    for (const number of numbers) {
      const found = pair.querySelectorAll(
        `[data-copy="${number}"], [data-source~="${number}"]`);
      for (const part of found) {
        part.classList.add("lit");
        const box = part.closest(".text");
        if (moved.has(box)) continue;
        moved.add(box);
        const top = part.offsetTop, bottom = top + part.offsetHeight;
        if (top < box.scrollTop || bottom > box.scrollTop + box.clientHeight)
          box.scrollTo({top: top - box.clientHeight / 3, behavior: "smooth"});
      }
    }
  };
  pair.addEventListener("mouseover", show);
  pair.addEventListener("mouseleave", show);
  pair.addEventListener("focusin", show);
}
""".strip()
