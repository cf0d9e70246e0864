"""Edits made by program: an instruction, a file before and after.

Real commits show what edits look like, but their messages rarely say what to change. These edits
teach the model to follow an instruction. Every method takes a text and returns the message, the
text and the new text. If it does not apply, it raises IndexError, as a choice from an empty list
does.
"""

from __future__ import annotations

import keyword
import re
import tomllib
from collections import Counter
from contextlib import suppress
from pathlib import Path
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
TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ODDS, CHOICES, PHRASES = TOLD["odds"], TOLD["choices"], TOLD["phrases"]


class Maker:
    """Draws edits with one random source; new names come from `code`, words from `texts`."""

    def __init__(self, rng: Random, code: list[str], texts: list[str]) -> None:
        self.rng = rng
        self.names, self.words = found(NAME, code), found(WORD, texts)

    def quoted(self, text: str) -> str:
        return self.rng.choice(["{}", "{}", "`{}`", "'{}'"]).format(text)

    def say(self, what: str, /, **parts: str) -> str:
        """Fill in one of the phrases, with or without a capital and a full stop."""
        phrase = self.rng.choice(PHRASES[what])
        text = phrase.format(**parts)
        if phrase[0] != "{" and phrase[:2] != "s/" and self.rng.random() < 0.6:
            text = text[:1].upper() + text[1:]
        return text + "." if self.rng.random() < 0.15 else text

    def one_of(self, pattern: re.Pattern[str], text: str) -> re.Match[str]:
        return self.rng.choice(list(pattern.finditer(text)))

    def some_words(self) -> str:
        return " ".join(self.rng.sample(self.words, self.rng.randrange(1, 4)))

    def fresh_name(self, old: str, text: str) -> str:
        """Return a new name in the old one's style; the old one if no tried name is new."""
        for _ in range(8):
            made = (
                self.rng.choice(self.names),
                "_".join(self.rng.sample(self.words, 2)),
                self.rng.choice(self.words),
                f"{self.rng.choice(CHOICES['prefixes'])}_{old.lstrip('_')}",
                f"{old}_{self.rng.choice(CHOICES['suffixes'])}",
            )
            [new] = self.rng.choices(made, (0.35, 0.15, 0.1, 0.2, 0.2))
            if old[:1].isupper() and not old.isupper():
                new = "".join(part[:1].upper() + part[1:] for part in new.split("_"))
            elif old.isupper():
                new = new.upper()
            if not re.search(rf"\b{re.escape(new)}\b", text) and not keyword.iskeyword(new):
                return new
        return old

    def rename(self, text: str) -> Edit:
        counts = Counter(n for n in NAME.findall(text) if n not in BUILTIN)
        old = self.rng.choice([n for n, c in counts.items() if 2 <= c <= 14])
        kind = self.rng.choice(["", "", "variable " if old.islower() else ""])
        functions = [m[1] for m in DEF.findall(text) if m[1] in counts]
        classes = [n for n in CLASS.findall(text) if n in counts]
        roll = self.rng.random()
        if functions and roll < 0.35:
            old, kind = self.rng.choice(functions), "function "
        elif classes and roll < 0.5:
            old, kind = self.rng.choice(classes), "class "
        new = self.fresh_name(old, text)
        after = re.sub(rf"\b{re.escape(old)}\b", new, text)
        said = self.quoted(old)
        return self.say("rename", kind=kind, old=said, new=said.replace(old, new, 1)), text, after

    def number(self, text: str) -> Edit:
        m = self.one_of(NUMBER, text)
        name, old = m[2], m[4]
        same = re.findall(rf"^ *{re.escape(name)} = {re.escape(old)}$", text, re.MULTILINE)
        need(len(same) == 1)
        new = str(self.rng.choice(CHOICES["numbers"]))
        if "." in old:
            new = f"{self.rng.randrange(10)}.{self.rng.randrange(1, 100)}"
        message = self.say("number", name=self.quoted(name), old=old, new=new)
        return message, text, splice(text, m, 4, new)

    def default(self, text: str) -> Edit:
        m = self.one_of(DEFAULT, text)
        name, old = m[1], m[2]
        swaps = {"True": "False", "False": "True", "None": self.rng.choice(["True", "0", "False"])}
        new = swaps.get(old) or str(self.rng.choice(CHOICES["defaults"]))
        after = re.sub(rf"\b{re.escape(name)}={old}\b", f"{name}={new}", text)
        return self.say("default", name=name, old=old, new=new), text, after

    def string(self, text: str) -> Edit:
        m = self.one_of(STRING, text)
        quote, old = m[1], m[2]
        if self.rng.random() < 0.4:
            new = self.some_words()
        else:
            parts = old.split(" ")
            parts[self.rng.randrange(len(parts))] = self.rng.choice(self.words)
            new = " ".join(parts)
        message = self.say("string", q=quote, old=old, new=new)
        return message, text, text.replace(m[0], f"{quote}{new}{quote}")

    def word(self, text: str) -> Edit:
        """Replace a word everywhere, in prose and in code."""
        counts = Counter(WORD.findall(text))
        some = [w for w, c in counts.items() if c <= 8 and w not in BUILTIN]
        old, new = self.rng.choice(some), self.rng.choice(self.words)
        return self.say("word", old=old, new=new), text, re.sub(rf"\b{old}\b", new, text)

    def typo(self, text: str) -> Edit:
        """Correct a misspelled word; the misspelling is added to the old file here."""
        m = self.one_of(re.compile(r"\b[a-z]{5,12}\b"), text)
        good = m[0]
        at = self.rng.randrange(1, len(good) - 1)
        missing = good[:at] + good[at + 1 :]
        doubled = good[:at] + good[at] + good[at:]
        swapped = good[:at] + good[at + 1] + good[at] + good[at + 2 :]
        bad = self.rng.choice([missing, doubled, swapped])
        need(bad != good and not re.search(rf"\b{bad}\b", text))
        message = self.say("typo", bad=bad, good=good)
        return message, splice(text, m, 0, bad), text

    def block(self, text: str, m: re.Match[str]) -> tuple[int, int]:
        """Return where a definition starts (with its decorators) and ends."""
        indent, start, end = len(m[1]), m.start(), m.end()
        for line in reversed(text[:start].splitlines(keepends=True)):
            if not line.startswith(m[1] + "@"):
                break
            start -= len(line)
        for line in text[m.end() :].splitlines(keepends=True):
            if line.strip() and len(line) - len(line.lstrip(" ")) <= indent:
                break
            end += len(line)
        return start, end

    def remove_function(self, text: str) -> Edit:
        found = list(DEF.finditer(text))
        need(len(found) > 1)
        m = self.rng.choice(found)
        start, end = self.block(text, m)
        need(end - start <= 0.6 * len(text) and len(re.findall(rf"\bdef {m[2]}\b", text)) == 1)
        what = "method" if m[1] else "function"
        message = self.say("remove_function", name=self.quoted(m[2]), what=what)
        after = text[:start] + text[end:]
        return message, text, after.rstrip("\n") + "\n" if end == len(text) else after

    def docstring(self, text: str) -> Edit:
        """Write, remove or replace a function's one-line docstring."""
        m = self.one_of(DEF, text)
        name, rest = m[2], text[m.end() :]
        old = re.match(r' *"""([^"\n]+)"""\n', rest)
        need(old is not None or not rest.lstrip().startswith(('"""', "r'", "'''", 'r"')))
        if old is not None and self.rng.random() >= 0.4:
            message = self.say("remove_docstring", name=self.quoted(name))
            return message, text, text[: m.end()] + rest[old.end() :]
        verb = self.rng.choice(CHOICES["verbs"])
        noun = name.strip("_").replace("_", " ") if self.rng.random() < 0.5 else ""
        said = f"{verb} the {noun or self.some_words()}."
        message = self.say("docstring", name=name, said=said).rstrip(".")
        if old is not None:
            message = message.replace("dd a doc", "hange the doc")
            message = message.replace("to " + name, "of " + name)
            rest = rest[old.end() :]
        return message, text, f'{text[: m.end()]}{m[1]}    """{said}"""\n{rest}'

    def parameter(self, text: str) -> Edit:
        """Add a parameter at the end of a function's list."""
        m = self.rng.choice([m for m in DEF.finditer(text) if "*" not in m[3] and "\n" not in m[3]])
        name = self.rng.choice(self.words)
        need(not re.search(rf"\b{name}\b", m[3]))
        new = f"{name}={self.rng.choice(['None', 'True', 'False', '0', '1', '10'])}"
        given = f"{m[3].rstrip(', ')}, {new}" if m[3].strip() else new
        message = self.say("parameter", new=self.quoted(new), name=self.quoted(m[2]))
        return message, text, splice(text, m, 3, given)

    def returns(self, text: str) -> Edit:
        """Add a return annotation."""
        m = self.rng.choice([m for m in DEF.finditer(text) if not m[4]])
        kind = self.rng.choice(CHOICES["types"])
        close = m.end(3) + 1
        message = self.say("returns", name=self.quoted(m[2]), kind=kind)
        return message, text, text[:close] + f" -> {kind}" + text[close:]

    def add_import(self, text: str) -> Edit:
        module = self.rng.choice(CHOICES["modules"])
        need(not re.search(rf"\bimport {module}\b", text))
        after = IMPORT.sub(rf"import {module}\n\g<0>", text, count=1)
        return self.say("add_import", module=module), text, after

    def remove_import(self, text: str) -> Edit:
        found = [m for m in IMPORT.finditer(text) if "(" not in m[0] and "\\" not in m[0]]
        need(len(found) > 1)
        m = self.rng.choice(found)
        message = self.say("remove_import", line=self.quoted(m[0]))
        return message, text, text[: m.start()] + text[m.end() + 1 :]

    def comments(self, text: str) -> Edit:
        need(0 < len(COMMENT.findall(text)) <= 12)
        return self.say("comments"), text, COMMENT.sub("", text)

    def delete_line(self, text: str) -> Edit:
        lines = text.splitlines(keepends=True)
        need(len(lines) > 3)
        at = self.rng.choice(unique(lines, text, 70))
        message = self.say("delete_line", line=self.quoted(lines[at].strip()))
        return message, text, "".join(lines[:at] + lines[at + 1 :])

    def add_line(self, text: str) -> Edit:
        lines = text.splitlines(keepends=True)
        at = self.rng.choice(unique(lines, text, 60))
        line = lines[at].strip()
        indent = lines[at][: lines[at].index(line)]
        a, b = self.rng.sample(self.words, 2)
        new = self.rng.choice([f"# {a} {b}", f"{a} = {b}", f"{a}({b})"])
        place = self.rng.choice(["after", "before"])
        message = self.say("add_line", new=self.quoted(new), place=place, line=self.quoted(line))
        cut = at + 1 if place == "after" else at
        return message, text, "".join([*lines[:cut], f"{indent}{new}\n", *lines[cut:]])

    def printing(self, text: str) -> Edit:
        need(0 < len(re.findall(r"\bprint\(", text)) < 15)
        new = self.rng.choice(CHOICES["printers"])
        return self.say("printing", new=new), text, re.sub(r"\bprint\(", f"{new}(", text)

    def version(self, text: str) -> Edit:
        m = self.one_of(VERSION, text)
        old, parts = m[0], [int(p) for p in m[0].split(".")]
        at = self.rng.randrange(3)
        new = ".".join(map(str, [*parts[:at], parts[at] + 1, *([0] * (2 - at))]))
        after = re.sub(rf"(?<![\d.]){re.escape(old)}(?![\d.])", new, text)
        return self.say("version", old=old, new=new), text, after

    def heading(self, text: str) -> Edit:
        m = self.one_of(HEADING, text)
        new = self.some_words().capitalize()
        message = self.say("heading", old=self.quoted(m[2]), new=self.quoted(new))
        return message, text, splice(text, m, 2, new)

    def make(self, text: str, is_code: bool) -> Edit | None:
        """Make one edit of this text, or sometimes two in one."""
        edits = ODDS["code" if is_code else "text"]
        made = self.one(text, edits)
        if made is None or self.rng.random() > 0.08:
            return made
        message, before, between = made
        again = self.one(between, {name: often for name, often in edits.items() if name != "typo"})
        if again is None:
            return made
        joined = self.rng.choice(["{} and {}", "{}; {}", "{}, then {}"]).format(
            message.rstrip("."), again[0][:1].lower() + again[0][1:]
        )
        return joined, before, again[2]

    def one(self, text: str, edits: dict[str, float]) -> Edit | None:
        for _ in range(6):
            [name] = self.rng.choices(list(edits), list(edits.values()))
            with suppress(IndexError):
                edit: Edit = getattr(self, name)(text)
                if edit[1] != edit[2]:
                    return edit
        return None


def need(holds: bool) -> None:
    """Raise IndexError if an edit does not apply."""
    if not holds:
        raise IndexError


def found(pattern: re.Pattern[str], texts: list[str]) -> list[str]:
    """Return what a pattern finds in some texts, each once, sorted."""
    return sorted({name for text in texts for name in pattern.findall(text)})


def splice(text: str, m: re.Match[str], group: int, new: str) -> str:
    """Replace a group of a match in a text."""
    return text[: m.start(group)] + new + text[m.end(group) :]


def unique(lines: list[str], text: str, longest: int) -> list[int]:
    """Return indices of lines with content that occurs only once in a text."""
    some = [i for i, line in enumerate(lines) if 8 < len(line.strip()) < longest]
    return [i for i in some if text.count(lines[i].strip()) == 1]


def window(rng: Random, text: str) -> str:
    """Return a piece of a file, cut at unindented lines; short ones as likely as long ones."""
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
