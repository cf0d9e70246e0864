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
the rest the model wrote itself. <span id="load"></span></p>
<form id="form">
<label for="prompt">Prompt</label>
<textarea id="prompt" rows="5" required autofocus></textarea>
<details><summary>Prediction: what the answer will resemble</summary>
<textarea id="prediction" rows="5" aria-label="Prediction"></textarea></details>
<p class="row"><label>Tokens <input id="tokens" type="number" min="1" value="256"></label>
{key if keys else ""}<button id="send">Send</button>
<button id="stop" type="button" disabled>Stop</button>
<button id="compare" type="button" disabled>Compare with plain</button></p>
</form>
<p id="error" role="alert"></p>
<div id="shown" hidden>
<section id="answer" class="card" aria-label="Answer" tabindex="0"></section>
<p id="figures" role="status"></p>
<p id="versus" role="status"></p>
<p id="legend" class="row"></p>
<h2>Pass by pass</h2>
<p class="row"><label>Passes
<input id="pass" type="range" min="0" max="0" value="0" disabled></label>
<span id="about"></span></p>
<section id="tree" class="card" aria-label="Guesses of this pass" tabindex="0"></section>
<h2>Accepted by depth</h2>
<div id="depths" class="row"></div>
</div>"""
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
#figures, #versus, #about, #load { font-variant-numeric: tabular-nums; margin: 6px 0; }
mark { color: inherit; border-radius: 3px; background: hsl(var(--hue) 75% 50% / 0.3); }
meter { width: 84px; }
#tree { min-height: 3em; padding: 10px 12px; overflow-x: auto; }
#tree div { display: flex; gap: 4px; width: max-content; }
#tree .beside { flex-direction: column; }
#tree mark { white-space: pre; padding: 0 5px; border: 2px solid transparent; }
#tree .right { border-color: currentColor; }
#tree .wrong { color: var(--soft); border-color: var(--rule); border-style: dashed; }
"""

_SCRIPT = r"""
const at = (id) => document.getElementById(id);
const hues = [145, 215, 35, 285, 0, 180, 60, 325], sources = [];
const none = () => ({passes: [], stats: null, began: performance.now(), first: 0, last: 0});
let asked = null, run = none(), plain = null, cancel = null;

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

function tree(guesses, root = -1) {
  const beside = document.createElement("div");
  beside.className = "beside";
  guesses.forEach(([text, parent, source, right], number) => {
    if (parent !== root) return;
    const line = document.createElement("div"), guess = span([text, source]);
    guess.textContent = text.replace(/\n/g, "⏎") || " ";
    guess.className = right ? "right" : "wrong";
    guess.title = `${source}, ${right ? "accepted" : "rejected"}`;
    line.append(guess, tree(guesses, number));
    beside.append(line);
  });
  return beside;
}

const tokens = (one) => one.passes.flatMap((pass) => pass.tokens);
const speed = ({passes, first, last}) =>
  passes.slice(1).flatMap((pass) => pass.tokens).length / Math.max(last - first, 1) * 1000;

function show() {
  const number = +at("pass").value, shown = run.passes.slice(0, number), all = tokens(run);
  at("answer").replaceChildren(...shown.flatMap((pass) => pass.tokens).map(span));
  const guessed = all.filter(([, source]) => source !== "target").length;
  at("figures").textContent = all.length
    ? `${all.length} tokens in ${run.passes.length} passes, ${guessed} guessed, ` +
      `${speed(run).toFixed(1)} tokens/s, first after ` +
      `${((run.first - run.began) / 1000).toFixed(2)} s`
    : "";
  at("versus").textContent = plain?.passes.length > 1 ? versus() : "";
  const guesses = shown.at(-1)?.guesses ?? [], right = guesses.filter((guess) => guess[3]).length;
  at("tree").replaceChildren(...(guesses.length ? [tree(guesses)] : []));
  at("legend").replaceChildren(...sources.map((source) => span([source, source])));
  at("about").textContent = number
    ? `${number} of ${run.passes.length}: guessed ${guesses.length}, right ${right}, ` +
      `tokens ${shown.at(-1).tokens.length}`
    : "";
  at("depths").replaceChildren(...(run.stats?.drafted_by_depth ?? []).map((drafted, depth) => {
    const label = document.createElement("label"), meter = document.createElement("meter");
    meter.value = (run.stats.accepted_by_depth[depth] ?? 0) / drafted;
    label.append(`${depth + 1} `, meter, ` ${Math.round(100 * meter.value)} %`);
    return label;
  }));
}

function versus() {
  const text = (one) => tokens(one).map(([said]) => said).join("");
  const whole = plain.stats ? ` ${text(plain) === text(run) ? "The same" : "Another"} answer.` : "";
  return `Plain decoding: ${speed(plain).toFixed(1)} tokens/s; with guesses ` +
    `${(speed(run) / speed(plain)).toFixed(2)} times as fast.${whole}`;
}

function take(told, into) {
  if (told.error) throw new Error(told.error.message);
  into.stats = told.stats ?? into.stats;
  const choice = told.choices?.[0];
  if (!choice?.sources.length) return;
  into.last = performance.now();
  into.first = into.first || into.last;
  into.passes.push({tokens: choice.sources, guesses: choice.drafts?.[0] ?? []});
  if (into !== run) return;
  const bar = at("pass"), following = +bar.value === run.passes.length - 1;
  bar.max = run.passes.length;
  if (following) bar.value = run.passes.length;
}

const key = () => at("key")?.value ? {Authorization: `Bearer ${at("key").value}`} : {};

async function stream(body, into) {
  const headers = {"Content-Type": "application/json", ...key()};
  const path = settings.chat ? "v1/chat/completions" : "v1/completions";
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
      if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)), into);
    }
    show();
  }
}

async function ask(body, into) {
  cancel?.abort();
  const mine = cancel = new AbortController();
  const busy = (yes) => {
    at("send").disabled = at("compare").disabled = yes;
    at("pass").disabled = yes && into === run;
    at("stop").disabled = !yes;
  };
  busy(true);
  at("shown").hidden = false;
  at("error").textContent = "";
  show();
  try { await stream(body, into); } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = `No answer: ${error.message}`;
  }
  if (cancel !== mine) return;
  busy(false);
  at("compare").disabled = !run.stats;
  show();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = at("prompt").value, content = at("prediction").value;
  asked = {
    max_tokens: +at("tokens").value, seed: Date.now() % 1e9, stream: true,
    return_sources: true, return_drafts: true, return_stats: true,
    ...(settings.chat ? {messages: [{role: "user", content: prompt}]} : {prompt}),
    ...(content ? {prediction: {type: "content", content}} : {}),
  };
  run = none();
  plain = null;
  at("pass").max = at("pass").value = 0;
  ask(asked, run);
});
at("compare").addEventListener("click", () => {
  plain = none();
  ask({...asked, drafter: "none"}, plain);
});
at("stop").addEventListener("click", () => cancel?.abort());
at("pass").addEventListener("input", show);
at("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});

async function load() {
  if (document.hidden || (at("key") && !at("key").value)) return;
  let said = "The server does not answer.";
  try {
    const answer = await fetch("metrics", {headers: key()});
    if (!answer.ok) return;
    const told = await answer.text();
    const figure = (name) => +told.match(new RegExp(`^vllm:${name}{.*} (.*)$`, "m"))[1];
    said = `The server has ${figure("num_requests_running")} answers running, ` +
      `${figure("num_requests_waiting")} waiting, and ` +
      `${Math.round(100 * figure("kv_cache_usage_perc"))} % of its memory in use.`;
  } catch {}
  at("load").textContent = said;
}
setInterval(load, 2000);
load();
"""
