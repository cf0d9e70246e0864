"""The page at `/`: write a prompt, see the answer come, every token coloured by who guessed it."""

from __future__ import annotations

import json
from html import escape

from draftsmith import html

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}
"""It loads nothing, and asks nobody but its own server."""


def page(model: str, chat: bool, keys: bool) -> str:
    """All of it. `chat`: whether the model has a template for that. `keys`: whether it asks one."""
    key = '<label>API key <input id="key" type="password" autocomplete="off"></label>'
    body = f"""<h1>draftsmith</h1>
<p class="note">{escape(model)}. Ctrl-Enter sends. What is coloured was guessed and checked,
the rest the model wrote itself.</p>
<form id="form">
<label for="prompt">Prompt</label>
<textarea id="prompt" rows="5" required autofocus></textarea>
<details><summary>Prediction: what the answer will resemble</summary>
<textarea id="prediction" rows="5" aria-label="Prediction"></textarea></details>
<p class="row"><label>Tokens <input id="tokens" type="number" min="1" value="256"></label>
{key if keys else ""}<button id="send">Send</button>
<button id="stop" type="button" disabled>Stop</button></p>
</form>
<p id="error" role="alert"></p>
<section id="answer" class="card" aria-label="Answer" tabindex="0"></section>
<p class="row"><label>Passes
<input id="pass" type="range" min="0" max="0" value="0" disabled></label>
<span id="figures" role="status"></span></p>
<p id="legend" class="row"></p>
<h2>Accepted by depth</h2>
<div id="depths" class="row"></div>"""
    settings = json.dumps({"chat": chat}).replace("<", "\\u003c")
    return html.page("draftsmith", body, _STYLE, f"const settings = {settings};{_SCRIPT}")


_STYLE = """
main { max-width: 860px; }
label, summary { color: var(--soft); font-size: 0.9rem; }
textarea { width: 100%; font: inherit; padding: 8px 10px; resize: vertical; }
textarea, input, button {
  background: var(--card); color: var(--ink); border: 1px solid var(--rule); border-radius: 8px;
}
input, button { font: inherit; padding: 4px 10px; }
input[type=number] { width: 6em; }
input[type=range] { vertical-align: middle; width: min(360px, 60vw); padding: 0; }
button { cursor: pointer; }
button:disabled { opacity: 0.5; cursor: default; }
:focus-visible { outline: 2px solid #3b82f6; outline-offset: 1px; }
.row { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; }
#error { color: #d43a3a; min-height: 1.5em; margin: 4px 0; }
#answer { min-height: 8em; padding: 12px 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
#figures { font-variant-numeric: tabular-nums; }
mark { color: inherit; border-radius: 3px; background: hsl(var(--hue) 75% 50% / 0.3); }
meter { width: 84px; }
"""

_SCRIPT = r"""
const at = (id) => document.getElementById(id);
const hues = [145, 215, 35, 285, 0, 180, 60, 325], sources = [];
let passes = [], stats = null, began = 0, first = 0, last = 0, cancel = null;

function span([text, source]) {
  const made = document.createElement(source === "target" ? "span" : "mark");
  made.textContent = text;
  made.title = made.dataset.source = source;
  if (source !== "target") {
    if (!sources.includes(source)) sources.push(source);
    made.style.setProperty("--hue", hues[sources.indexOf(source) % hues.length]);
  }
  return made;
}

function show() {
  const shown = passes.slice(0, +at("pass").value).flat();
  at("answer").replaceChildren(...shown.map(span));
  const all = passes.flat(), guessed = all.filter(([, source]) => source !== "target").length;
  const seconds = Math.max(last - first, 1) / 1000, waited = (first - began) / 1000;
  const speed = (all.length - (passes[0] ?? []).length) / seconds;
  at("figures").textContent = all.length
    ? `${all.length} tokens in ${passes.length} passes, ${guessed} guessed, ` +
      `${speed.toFixed(1)} tokens/s, first after ${waited.toFixed(2)} s`
    : "";
  at("legend").replaceChildren(...sources.map((source) => span([source, source])));
  at("depths").replaceChildren(...(stats?.drafted_by_depth ?? []).map((drafted, depth) => {
    const label = document.createElement("label"), meter = document.createElement("meter");
    meter.value = (stats.accepted_by_depth[depth] ?? 0) / drafted;
    label.append(`${depth + 1} `, meter, ` ${Math.round(100 * meter.value)} %`);
    return label;
  }));
}

function take(told) {
  if (told.error) throw new Error(told.error.message);
  stats = told.stats ?? stats;
  const tokens = told.choices?.[0]?.sources ?? [];
  if (!tokens.length) return;
  last = performance.now();
  first = first || last;
  const bar = at("pass"), following = +bar.value === passes.length;
  passes.push(tokens);
  bar.max = passes.length;
  if (following) bar.value = passes.length;
}

async function ask() {
  const prompt = at("prompt").value, body = {
    max_tokens: +at("tokens").value, stream: true, return_sources: true, return_stats: true,
    ...(settings.chat ? {messages: [{role: "user", content: prompt}]} : {prompt}),
  };
  const content = at("prediction").value;
  if (content) body.prediction = {type: "content", content};
  const headers = {"Content-Type": "application/json"};
  if (at("key")?.value) headers.Authorization = `Bearer ${at("key").value}`;
  const path = settings.chat ? "v1/chat/completions" : "v1/completions";
  cancel = new AbortController();
  const answer = await fetch(
    path, {method: "POST", headers, body: JSON.stringify(body), signal: cancel.signal});
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the server ended in the middle of the answer");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
    }
    show();
  }
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  cancel?.abort();
  passes = []; stats = null; first = last = 0; began = performance.now();
  at("pass").max = at("pass").value = 0;
  at("pass").disabled = at("send").disabled = true;
  at("stop").disabled = false;
  at("error").textContent = "";
  show();
  try { await ask(); } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = `No answer: ${error.message}`;
  }
  at("pass").disabled = at("send").disabled = false;
  at("stop").disabled = true;
  show();
});
at("stop").addEventListener("click", () => cancel?.abort());
at("pass").addEventListener("input", show);
at("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
"""
