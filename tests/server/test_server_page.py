"""The page at `/` as a browser runs it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serving import api_of, client_of, engine, listening, until

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.testing import Scripted

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


def test_the_page_loads_nothing_and_asks_nobody_else() -> None:
    with client_of() as client:
        response = client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http" not in response.text.replace("https://example.org", "")
    assert "src=" not in response.text
    assert "API key" not in response.text
    before, hidden = response.text.split('<div id="shown" hidden>')
    assert 'class="card"' not in before, "no empty boxes before the first answer"
    assert hidden.count('class="card"') == 2
    assert 'at("shown").hidden = false' in hidden
    with client_of(api_of(keys=("one",))) as client:
        assert client.get("/").status_code == 401
    with client_of(api_of(keys=("one",), public=True)) as client:
        assert "API key" in client.get("/").text


class Browser:
    """Chromium without a window, driven over a pipe of its own."""

    def __init__(self, folder: Path) -> None:
        hears, self._tell = os.pipe()
        self._hear, tells = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{hears} 4>&{tells}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, str(folder)],
            pass_fds=(hears, tells), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(hears)
        os.close(tells)
        self._held, self._asked, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **params: Any) -> Any:
        """What a command of the protocol gives."""
        self._asked += 1
        message: dict[str, Any] = {"id": self._asked, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._tell, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                data = os.read(self._hear, 1 << 16)
                assert data, "the browser ended"
                self._held += data
            line, _, self._held = self._held.partition(b"\0")
            told = json.loads(line)
            if told.get("id") == self._asked:
                assert "error" not in told, told
                return told["result"]

    def run(self, script: str) -> Any:
        """The value of an expression."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def key(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code, modifiers=modifiers)  # fmt: skip

    def shot(self, path: Path, width: int, dark: bool) -> None:
        """A picture of the page."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._tell)
        os.close(self._hear)


@pytest.mark.external
@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
def test_the_page_asks_streams_scrubs_and_tells_errors(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    messages = [{"role": "user", "content": text}]
    plain = engine("none").generate(messages, max_new_tokens=30, min_new_tokens=30)

    def knows(ctx: Context) -> Draft:
        new = len(ctx.ids) - ctx.prompt_length
        source, right = ("first", "second")[new % 3 == 0], plain.tokens[new : new + 2]
        if not new % 2 or len(right) < 2:
            return Draft.chain([5], source)
        tokens = ((right[0] + 1) % ctx.vocab_size, *right)
        return Draft(tokens, (-1, -1, 1), (source,) * 3)

    made = engine(Scripted(knows), budget=3)
    expected = made.generate(messages, max_new_tokens=30)
    assert len(set(expected.sources)) == 3
    with closing(Browser(tmp_path / "profile")) as page:
        with listening(api_of(made)) as address:
            page.call("Page.navigate", url=address + "/")
            # The browser focuses a field when it first renders it, which is after it parsed it.
            focused = "document.activeElement.id === 'prompt'"
            until(lambda: page.run(f"document.readyState === 'complete' && {focused}"))
            assert page.run("at('shown').hidden") is True
            page.call("Input.insertText", text=text)
            page.run(f"at('tokens').value = 30; at('prediction').value = {text!r}; 1")
            page.key("Enter", 13, modifiers=2)
            until(lambda: page.run("!at('send').disabled && run.passes.length > 0"))
            assert page.run("at('error').textContent") == ""
            assert page.run("at('shown').hidden") is False
            assert page.run("at('answer').textContent") == expected.text
            sources = page.run("tokens(run).map((token) => token[1])")
            assert sources == expected.sources
            shown = page.run("[...at('answer').children].map((made) => made.dataset.source)")
            assert shown == expected.sources
            assert page.run("run.passes.length") == expected.stats.passes
            assert f"{len(expected.tokens)} tokens in" in page.run("at('figures').textContent")
            legend = page.run("[...at('legend').children].map((made) => made.textContent)")
            assert sorted(legend) == sorted(
                f"{source}: {own.accepted} of {own.drafted} accepted"
                for source, own in expected.stats.by_source.items()
            )
            depths = page.run("at('depths').children.length")
            assert depths == len(expected.stats.drafted_by_depth)
            page.run("at('pass').focus(); 1")
            for _ in range(3):
                page.key("ArrowLeft", 37)
            assert page.run("+at('pass').value") == expected.stats.passes - 3
            left = page.run("at('answer').children.length")
            assert left == page.run("tokens({passes: run.passes.slice(0, -3)}).length")
            for number in range(expected.stats.passes, 0, -1):
                page.run(f"at('pass').value = {number}; show(); 1")
                guesses = page.run(f"run.passes[{number - 1}].guesses")
                marks = page.run("[...at('tree').querySelectorAll('mark')].map((m) => m.className)")
                assert marks == ["right" if right else "wrong" for *_, right in guesses]
                kept = page.run(f"run.passes[{number - 1}].tokens")
                accepted = [source for _, _, source, right in guesses if right]
                assert accepted == [source for _, source in kept if source != "target"]
                below = page.run("at('tree').querySelectorAll('.beside .beside mark').length")
                assert below == sum(parent >= 0 for _, parent, _, _ in guesses)
            assert page.run("run.passes.some(({guesses}) => guesses.length === 3)")
            page.run("at('compare').click(); 1")
            until(lambda: page.run("!at('send').disabled && plain.stats !== null"))
            said = page.run("at('versus').textContent")
            assert said.startswith("Plain decoding: ")
            assert said.endswith("The same answer.")
            assert page.run("tokens(plain).every((token) => token[1] === 'target')")
            assert page.run("run.passes.length") == expected.stats.passes
            widest = "run.passes.findLastIndex(({guesses}) => guesses.length > 2)"
            page.run(f"at('pass').value = 1 + {widest}; show(); 1")
            until(lambda: "waiting: 0" in page.run("at('load').textContent"))
            for width in (390, 820, 1280):
                for dark in (False, True):
                    name = f"page-{width}-{'dark' if dark else 'light'}.png"
                    page.shot(tmp_path / name, width, dark)
                    wide = page.run("document.documentElement.scrollWidth")
                    assert wide <= width, f"{width}: {wide} wide"
            page.run("at('pass').max = 0; ask({...asked, temperature: 9}, run = none()); 1")
            until(lambda: page.run("!at('send').disabled"))
            assert "temperature" in page.run("at('error').textContent")
        page.run("at('form').requestSubmit(); 1")
        until(lambda: page.run("!at('send').disabled"))
        assert page.run("at('error').textContent").startswith("No answer: ")
