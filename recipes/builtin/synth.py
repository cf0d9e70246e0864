"""Edits made by program: an instruction, a file before and after.

Real commits teach what edits look like, but their messages rarely say what to change. These do, so
they are what teaches the model to follow an instruction. Every edit takes a text and returns the
message with the new text, or None where it does not apply.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable
from random import Random

Edit = tuple[str, str, str]  # message, before, after

NAME = re.compile(r"(?<![\w.])[A-Za-z_][A-Za-z0-9_]{2,}\b")
DEF = re.compile(r"^( *)(?:async )?def (\w+)\(([^()]*)\)( *->[^:\n]+)?:[ ]*\n", re.MULTILINE)
CLASS = re.compile(r"^class (\w+)\b", re.MULTILINE)
NUMBER = re.compile(r"^( *)(\w+)( = )(\d+(?:\.\d+)?)$", re.MULTILINE)
DEFAULT = re.compile(r"\b(\w{2,})=(\d+|None|True|False)\b")
STRING = re.compile(r"(?<!['\"\w])(['\"])([A-Za-z][^'\"\\\n{}%]{3,50})\1(?!['\"])")
WORD = re.compile(r"\b[a-z]{4,12}\b")
HEADING = re.compile(r"^(#{1,4}) ([^\n]{3,60})$", re.MULTILINE)
IMPORT = re.compile(r"^(?:import|from) [^\n]+$", re.MULTILINE)
COMMENT = re.compile(r"^ *#(?![!]| *-\*-)[^\n]*\n", re.MULTILINE)
VERSION = re.compile(r"\b\d+\.\d+\.\d+\b")
BUILTIN = {*keyword.kwlist, *["self", "cls", "print", "range", "len", "int", "str"]}
PREFIXES = [
    "new",
    "old",
    "get",
    "max",
    "min",
    "base",
    "raw",
    "my",
    "current",
    "total",
    "first",
    "is",
]
SUFFIXES = ["value", "name", "list", "data", "item", "2", "path", "count", "info", "map", "index"]
MODULES = ["os", "sys", "json", "re", "time", "math", "random", "logging", "itertools", "pathlib"]
TYPES = ["int", "str", "bool", "float", "None", "list", "dict", "bytes", "object"]


class Maker:
    """Draws edits with one random source; `names` are identifiers seen in other files."""

    def __init__(self, rng: Random, names: list[str], words: list[str]) -> None:
        self.rng = rng
        self.names = names
        self.words = words

    def quoted(self, text: str) -> str:
        return self.rng.choice(["{}", "{}", "`{}`", "'{}'"]).format(text)

    def say(self, *forms: str, **parts: str) -> str:
        """One of the forms, filled in, with or without a capital and a full stop."""
        form = self.rng.choice(forms)
        text = form.format(**parts)
        if form[0] != "{" and form[:2] != "s/" and self.rng.random() < 0.6:
            text = text[:1].upper() + text[1:]
        return text + "." if self.rng.random() < 0.15 else text

    def fresh_name(self, old: str, text: str) -> str | None:
        """A new name in the old one's style that the text does not have yet."""
        for _ in range(8):
            roll = self.rng.random()
            if roll < 0.35:
                new = self.rng.choice(self.names)
            elif roll < 0.5:
                new = "_".join(self.rng.sample(self.words, 2))
            elif roll < 0.6:
                new = self.rng.choice(self.words)
            elif roll < 0.8:
                new = f"{self.rng.choice(PREFIXES)}_{old.lstrip('_')}"
            else:
                new = f"{old}_{self.rng.choice(SUFFIXES)}"
            if old[:1].isupper() and not old.isupper():
                new = "".join(part[:1].upper() + part[1:] for part in new.split("_"))
            elif old.isupper():
                new = new.upper()
            if not re.search(rf"\b{re.escape(new)}\b", text) and not keyword.iskeyword(new):
                return new
        return None

    def rename(self, text: str) -> Edit | None:
        counts = Counter(n for n in NAME.findall(text) if n not in BUILTIN)
        some = [n for n, c in counts.items() if 2 <= c <= 14]
        if not some:
            return None
        functions = [m[1] for m in DEF.findall(text) if m[1] in counts]
        classes = [n for n in CLASS.findall(text) if n in counts]
        roll, kind = self.rng.random(), ""
        if functions and roll < 0.35:
            old, kind = self.rng.choice(functions), "function "
        elif classes and roll < 0.5:
            old, kind = self.rng.choice(classes), "class "
        else:
            old = self.rng.choice(some)
            kind = self.rng.choice(["", "", "variable " if old.islower() else ""])
        new = self.fresh_name(old, text)
        if new is None:
            return None
        after = re.sub(rf"\b{re.escape(old)}\b", new, text)
        message = self.say(
            "rename {kind}{old} to {new}",
            "rename {kind}{old} to {new}",
            "rename the {kind}{old} to {new}",
            "rename {kind}{old} -> {new}",
            "use {new} instead of {old}",
            "replace {old} with {new}",
            "change {old} to {new}",
            kind=kind,
            old=(old_said := self.quoted(old)),
            new=old_said.replace(old, new, 1) if old_said != old else new,
        )
        return message, text, after

    def number(self, text: str) -> Edit | None:
        found = list(NUMBER.finditer(text))
        if not found:
            return None
        m = self.rng.choice(found)
        name, old = m[2], m[4]
        if len(re.findall(rf"^ *{re.escape(name)} = {re.escape(old)}$", text, re.MULTILINE)) > 1:
            return None
        new = str(
            self.rng.choice([1, 2, 3, 5, 8, 10, 16, 20, 32, 50, 64, 100, 200, 255, 500, 1000])
        )
        if "." in old:
            new = f"{self.rng.randrange(10)}.{self.rng.randrange(1, 100)}"
        if new == old:
            return None
        message = self.say(
            "set {name} to {new}",
            "change {name} to {new}",
            "change {name} from {old} to {new}",
            "bump {name} to {new}",
            "{name} should be {new}",
            name=self.quoted(name),
            old=old,
            new=new,
        )
        return message, text, text[: m.start(4)] + new + text[m.end(4) :]

    def default(self, text: str) -> Edit | None:
        found = list(DEFAULT.finditer(text))
        if not found:
            return None
        m = self.rng.choice(found)
        name, old = m[1], m[2]
        swaps = {"True": "False", "False": "True", "None": self.rng.choice(["True", "0", "False"])}
        new = swaps.get(old) or str(self.rng.choice([0, 1, 2, 3, 4, 5, 10, 20, 30, 60, 100, 128]))
        if new == old:
            return None
        message = self.say(
            "change {name}={old} to {name}={new}",
            "use {name}={new}",
            "set {name}={new} instead of {old}",
            "{name}: {new} instead of {old}",
            name=name,
            old=old,
            new=new,
        )
        after = re.sub(rf"\b{re.escape(name)}={old}\b", f"{name}={new}", text)
        return message, text, after

    def string(self, text: str) -> Edit | None:
        found = list(STRING.finditer(text))
        if not found:
            return None
        m = self.rng.choice(found)
        old = m[2]
        if self.rng.random() < 0.4:
            new = " ".join(self.rng.sample(self.words, self.rng.randrange(1, 4)))
        else:
            parts = old.split(" ")
            parts[self.rng.randrange(len(parts))] = self.rng.choice(self.words)
            new = " ".join(parts)
        if new == old:
            return None
        message = self.say(
            "change {q}{old}{q} to {q}{new}{q}",
            "replace {q}{old}{q} with {q}{new}{q}",
            "say {q}{new}{q} instead of {q}{old}{q}",
            q=m[1],
            old=old,
            new=new,
        )
        return message, text, text.replace(m[0], f"{m[1]}{new}{m[1]}")

    def word(self, text: str) -> Edit | None:
        """Another word everywhere, in prose as in code."""
        counts = Counter(WORD.findall(text))
        some = [w for w, c in counts.items() if c <= 8 and w not in BUILTIN]
        if not some:
            return None
        old, new = self.rng.choice(some), self.rng.choice(self.words)
        if old == new:
            return None
        message = self.say(
            "replace {old} with {new}",
            "change {old} to {new}",
            "write {new} instead of {old}",
            "s/{old}/{new}/",
            "{old} -> {new}",
            old=old,
            new=new,
        )
        return message, text, re.sub(rf"\b{old}\b", new, text)

    def typo(self, text: str) -> Edit | None:
        """A misspelt word put right: the misspelling is made here, in the old file."""
        words = list(re.finditer(r"\b[a-z]{5,12}\b", text))
        if not words:
            return None
        m = self.rng.choice(words)
        good = m[0]
        at = self.rng.randrange(1, len(good) - 1)
        bad = self.rng.choice(
            [
                good[:at] + good[at + 1 :],
                good[:at] + good[at] + good[at:],
                good[:at] + good[at + 1] + good[at] + good[at + 2 :],
            ]
        )
        if bad == good or re.search(rf"\b{bad}\b", text):
            return None
        message = self.say(
            "fix typo",
            "fix typo: {bad} -> {good}",
            "fix the spelling of {good}",
            "fix typo in {good}",
            "{bad} should be {good}",
            "correct {bad} to {good}",
            bad=bad,
            good=good,
        )
        return message, text[: m.start()] + bad + text[m.end() :], text

    def block(self, text: str, m: re.Match[str]) -> tuple[int, int]:
        """Where a definition starts (with its decorators) and ends."""
        indent = len(m[1])
        lines = text[: m.start()].split("\n")
        start = m.start()
        while len(lines) > 1 and lines[-2].startswith(" " * indent + "@"):
            start -= len(lines[-2]) + 1
            lines.pop(-2)
        end = m.end()
        for line in text[m.end() :].splitlines(keepends=True):
            if line.strip() and len(line) - len(line.lstrip(" ")) <= indent:
                break
            end += len(line)
        return start, end

    def remove_function(self, text: str) -> Edit | None:
        found = list(DEF.finditer(text))
        if len(found) < 2:
            return None
        m = self.rng.choice(found)
        start, end = self.block(text, m)
        if end - start > 0.6 * len(text) or len(re.findall(rf"\bdef {m[2]}\b", text)) > 1:
            return None
        what = "method" if m[1] else "function"
        message = self.say(
            "remove {name}",
            "remove the {what} {name}",
            "delete the {what} {name}",
            "remove {what} {name}",
            "drop {name}()",
            name=self.quoted(m[2]),
            what=what,
        )
        after = text[:start] + text[end:]
        return message, text, after.rstrip("\n") + "\n" if end == len(text) else after

    def docstring(self, text: str) -> Edit | None:
        """Write, take away or replace a function's one-line docstring."""
        found = list(DEF.finditer(text))
        if not found:
            return None
        m = self.rng.choice(found)
        indent, name = m[1] + "    ", m[2]
        rest = text[m.end() :]
        old = re.match(r' *"""([^"\n]+)"""\n', rest)
        if old is None and rest.lstrip().startswith(('"""', "r'", "'''", 'r"')):
            return None
        if old is None or self.rng.random() < 0.4:
            said = self.sentence(name)
            line = f'{indent}"""{said}"""\n'
            message = self.say(
                "add a docstring to {name}: {said}",
                "document {name}: {said}",
                "add the docstring '{said}' to {name}",
                "docstring for {name}: {said}",
                name=name,
                said=said,
            ).rstrip(".")
            message = message.replace(said.rstrip("."), said) if said[-1] != "." else message
            if old is not None:
                message = message.replace("dd a doc", "hange the doc").replace(
                    "to " + name, "of " + name
                )
                rest = rest[old.end() :]
            return message, text, text[: m.end()] + line + rest
        message = self.say(
            "remove the docstring of {name}",
            "drop the docstring from {name}",
            name=self.quoted(name),
        )
        return message, text, text[: m.end()] + rest[old.end() :]

    def sentence(self, name: str) -> str:
        """A short line about a function, made of its name and some words."""
        verb = self.rng.choice(
            ["Return", "Compute", "Build", "Check", "Read", "Make", "Get", "Print"]
        )
        noun = name.strip("_").replace("_", " ") if self.rng.random() < 0.5 else ""
        noun = noun or " ".join(self.rng.sample(self.words, self.rng.randrange(1, 4)))
        return f"{verb} the {noun}."

    def parameter(self, text: str) -> Edit | None:
        """A new parameter at the end of a function's list."""
        found = [m for m in DEF.finditer(text) if "*" not in m[3] and "\n" not in m[3]]
        if not found:
            return None
        m = self.rng.choice(found)
        name = self.rng.choice(self.words)
        if re.search(rf"\b{name}\b", m[3]):
            return None
        new = f"{name}={self.rng.choice(['None', 'True', 'False', '0', '1', '10'])}"
        given = f"{m[3].rstrip(', ')}, {new}" if m[3].strip() else new
        message = self.say(
            "add a parameter {new} to {name}",
            "add parameter {new} to {name}",
            "{name}: add {new}",
            "let {name} take {new}",
            new=self.quoted(new),
            name=self.quoted(m[2]),
        )
        return message, text, text[: m.start(3)] + given + text[m.end(3) :]

    def returns(self, text: str) -> Edit | None:
        """A return annotation."""
        found = [m for m in DEF.finditer(text) if not m[4]]
        if not found:
            return None
        m = self.rng.choice(found)
        kind = self.rng.choice(TYPES)
        message = self.say(
            "annotate {name} with -> {kind}",
            "add the return type {kind} to {name}",
            "{name} returns {kind}",
            "type hint: {name} -> {kind}",
            name=self.quoted(m[2]),
            kind=kind,
        )
        close = m.end(3) + 1
        return message, text, text[:close] + f" -> {kind}" + text[close:]

    def add_import(self, text: str) -> Edit | None:
        found = list(IMPORT.finditer(text))
        module = self.rng.choice(MODULES)
        if not found or re.search(rf"\bimport {module}\b", text):
            return None
        m = found[0]
        message = self.say("import {m}", "add import {m}", "add an import of {m}", m=module)
        return message, text, text[: m.start()] + f"import {module}\n" + text[m.start() :]

    def remove_import(self, text: str) -> Edit | None:
        found = [m for m in IMPORT.finditer(text) if "(" not in m[0] and "\\" not in m[0]]
        if len(found) < 2:
            return None
        m = self.rng.choice(found)
        message = self.say(
            "remove the line {line}",
            "remove unused import: {line}",
            "remove {line}",
            line=self.quoted(m[0]),
        )
        return message, text, text[: m.start()] + text[m.end() + 1 :]

    def comments(self, text: str) -> Edit | None:
        found = COMMENT.findall(text)
        if not found or len(found) > 12:
            return None
        message = self.say("remove comments", "remove all comments", "delete the comments")
        return message, text, COMMENT.sub("", text)

    def delete_line(self, text: str) -> Edit | None:
        lines = text.splitlines(keepends=True)
        some = [i for i, line in enumerate(lines) if 8 < len(line.strip()) < 70]
        some = [i for i in some if text.count(lines[i].strip()) == 1]
        if len(lines) < 4 or not some:
            return None
        at = self.rng.choice(some)
        message = self.say(
            "remove the line {line}",
            "delete the line {line}",
            "remove {line}",
            line=self.quoted(lines[at].strip()),
        )
        return message, text, "".join(lines[:at] + lines[at + 1 :])

    def add_line(self, text: str) -> Edit | None:
        lines = text.splitlines(keepends=True)
        some = [i for i, line in enumerate(lines) if 8 < len(line.strip()) < 60]
        some = [i for i in some if text.count(lines[i].strip()) == 1]
        if not some:
            return None
        at = self.rng.choice(some)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        words = self.rng.sample(self.words, 2)
        new = self.rng.choice(
            [f"# {' '.join(words)}", f"{words[0]} = {words[1]}", f"{words[0]}({words[1]})"]
        )
        place = self.rng.choice(["after", "before"])
        message = self.say(
            "add {new} {place} {line}",
            "insert {new} {place} the line {line}",
            "add the line {new} {place} {line}",
            new=self.quoted(new),
            place=place,
            line=self.quoted(lines[at].strip()),
        )
        cut = at + 1 if place == "after" else at
        return message, text, "".join([*lines[:cut], f"{indent}{new}\n", *lines[cut:]])

    def printing(self, text: str) -> Edit | None:
        if not 0 < len(re.findall(r"\bprint\(", text)) < 15:
            return None
        new = self.rng.choice(
            ["logger.info", "logging.debug", "log", "echo", "logger.debug", "write"]
        )
        message = self.say(
            "use {new} instead of print",
            "replace print with {new}",
            "change print to {new}",
            new=new,
        )
        return message, text, re.sub(r"\bprint\(", f"{new}(", text)

    def version(self, text: str) -> Edit | None:
        found = VERSION.findall(text)
        if not found:
            return None
        old = self.rng.choice(found)
        parts = [int(p) for p in old.split(".")]
        at = self.rng.randrange(3)
        parts = [*parts[:at], parts[at] + 1, *([0] * (2 - at))]
        new = ".".join(map(str, parts))
        message = self.say(
            "bump version to {new}", "release {new}", "bump {old} to {new}", old=old, new=new
        )
        return message, text, re.sub(rf"(?<![\d.]){re.escape(old)}(?![\d.])", new, text)

    def heading(self, text: str) -> Edit | None:
        found = list(HEADING.finditer(text))
        if not found:
            return None
        m = self.rng.choice(found)
        new = " ".join(self.rng.sample(self.words, self.rng.randrange(1, 4))).capitalize()
        message = self.say(
            "rename the section {old} to {new}",
            "change the heading {old} to {new}",
            "heading: {new} instead of {old}",
            old=self.quoted(m[2]),
            new=self.quoted(new),
        )
        return message, text, text[: m.start(2)] + new + text[m.end(2) :]

    def make(self, text: str, is_code: bool) -> Edit | None:
        """One edit of this text, or now and then two in one."""
        edits: list[tuple[float, Callable[[str], Edit | None]]]
        if is_code:
            edits = [
                (8, self.rename),
                (2, self.number),
                (1.5, self.default),
                (2, self.string),
                (1, self.word),
                (1, self.typo),
                (2, self.remove_function),
                (2.5, self.docstring),
                (1.5, self.parameter),
                (1, self.returns),
                (1, self.add_import),
                (0.5, self.remove_import),
                (0.6, self.comments),
                (0.6, self.delete_line),
                (0.8, self.add_line),
                (0.8, self.printing),
                (0.5, self.version),
            ]
        else:
            edits = [
                (5, self.word),
                (2, self.typo),
                (1, self.heading),
                (0.5, self.delete_line),
                (1, self.version),
                (0.5, self.string),
                (0.5, self.add_line),
            ]
        made = self.one(text, edits)
        if made is None or self.rng.random() > 0.08:
            return made
        message, before, between = made
        again = self.one(between, [e for e in edits if e[1] != self.typo])
        if again is None or again[1] != between:
            return made
        joined = self.rng.choice(["{} and {}", "{}; {}", "{}, then {}"]).format(
            message.rstrip("."), again[0][:1].lower() + again[0][1:]
        )
        return joined, before, again[2]

    def one(
        self, text: str, edits: list[tuple[float, Callable[[str], Edit | None]]]
    ) -> Edit | None:
        for _ in range(6):
            edit = self.rng.choices([e for _, e in edits], [w for w, _ in edits])[0](text)
            if edit is not None and edit[1] != edit[2]:
                return edit
        return None


def window(rng: Random, text: str) -> str:
    """A piece of a file, cut where lines are not indented; short pieces as likely as long ones."""
    lines = text.splitlines(keepends=True)
    size = int(8 * (200 / 8) ** rng.random())
    if len(lines) <= size * 1.3:
        return text
    starts = [0] + [
        i for i, line in enumerate(lines) if i and line[:1].strip() and not lines[i - 1].strip()
    ]
    start = 0 if rng.random() < 0.35 else rng.choice(starts)
    end = min(len(lines), start + size)
    ends = [i for i in starts if start + size // 2 < i <= start + size * 1.3]
    if ends:
        end = rng.choice(ends)
    return "".join(lines[start:end]).rstrip("\n") + "\n"
