"""Reports: figures and intervals, tables, the page, comparisons, bad files."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from command import call as run_command
from draftsmith.errors import LoadError, OptionError
from draftsmith.lab.bench import generations
from draftsmith.lab.bench.cost import CostTable, Point
from draftsmith.lab.bench.generations import Generation
from draftsmith.lab.bench.page import page
from draftsmith.lab.bench.plots import Plots
from draftsmith.lab.bench.report import facts, markdown
from draftsmith.lab.bench.summary import Section, interval, paces, sections, speed_ratio
from draftsmith.lab.bench.versus import compare_files
from draftsmith.lab.commands.bench_report import text_table

SETTINGS = {
    "model": "m", "weights": "7 (0)", "dtype": "bfloat16", "device": "cpu", "threads": 2,
    "arms": ["none", "hf:generate", "copyspec@4", "copyspec@8"], "temperature": 0.0,
    "machine": "Some CPU", "versions": {"torch": "2"}, "commit": "abc",
}  # fmt: skip
DRAFTERS = {
    "none": "none()",
    "hf:generate": "transformers.generate()",
    "copyspec@4": "copyspec(gamma=3, block=10)",
    "copyspec@8": "copyspec(gamma=3, block=10)",
}


def row(arm: str, number: int, seconds: float, tokens: int = 20, **more: Any) -> Generation:
    ours = not arm.startswith("hf:")
    drafted = 12 if arm.startswith("copy") else 0
    passes = tokens - 5 if drafted else tokens
    made: dict[str, Any] = {
        "id": f"s/{number}", "suite": "s", "category": None, "turn": 1, "run": 0, "arm": arm,
        "drafter": DRAFTERS[arm], "budget": 4, "seed": 0, "prompt_ids": [1, 2],
        "output_ids": list(range(tokens)), "text": "the answer is 42", "finish_reason": "stop",
        "max_new_tokens": 50, "seconds": seconds, "first_token_seconds": seconds / 10,
        "peak_bytes": 5 << 20, "passes": passes, "accepted": tokens - passes,
        "settings": SETTINGS, "compared": arm != "none",
    }  # fmt: skip
    if ours:
        share = dict.fromkeys(("prefill", "draft", "target", "verify", "other"), seconds / 6)
        made |= {"attempts": 3, "drafted": drafted, "phases": share | {"total": seconds}}
    if drafted:
        made |= {
            "drafted_by_depth": [3, 3, 3, 3], "accepted_by_depth": [3, 2],
            "by_source": {"copyspec": {"attempts": 3, "drafted": 12, "accepted": 5}},
        }  # fmt: skip
    return Generation(**(made | more))


def rows(factor: float = 2.0, count: int = 5, **more: Any) -> list[Generation]:
    found = []
    for number in range(count):
        slow = 1.0 + 0.2 * number
        found += [
            row("none", number, slow, **more),
            row("hf:generate", number, 1.25 * slow, **more),
            row("copyspec@4", number, slow / factor, **more),
            row("copyspec@8", number, slow / (factor + 0.1 * number), **more),
        ]
    return found


def section(found: list[Generation] | None = None) -> Section:
    (made,) = sections([found or rows()])
    return made


def line(one: Generation) -> str:
    return json.dumps(one.as_dict()) + "\n"


def write(path: Path, found: list[Generation]) -> Path:
    path.write_text("".join(map(line, found)), encoding="utf-8")
    return path


def test_speeds_are_totals_over_totals() -> None:
    made = section()
    by_arm = {s.arm: s for s in made.whole}
    assert made.baseline == "none"
    assert list(by_arm) == SETTINGS["arms"]
    none, four, eight = by_arm["none"], by_arm["copyspec@4"], by_arm["copyspec@8"]
    assert none.tokens_per_second.value == pytest.approx(100 / sum(1 + 0.2 * i for i in range(5)))
    assert four.speedup.value == pytest.approx(2)
    assert (four.speedup.low, four.speedup.high) == pytest.approx((2, 2))
    assert eight.speedup.low < eight.speedup.value < eight.speedup.high
    assert eight.macro_speedup == pytest.approx(2.2)
    assert by_arm["hf:generate"].speedup.value == pytest.approx(0.8)
    assert by_arm["hf:generate"].stats is None
    assert by_arm["hf:generate"].drafted_per_pass is None
    assert four.tokens_per_pass == pytest.approx(20 / 15)
    assert four.drafted_per_pass == pytest.approx(12 / 15)
    assert none.first_token_ms == pytest.approx(140)
    assert none.token_ms == pytest.approx(1400 * 0.9 / 19)
    assert (four.identical, four.compared) == (5, 5)
    assert four.peak_mib == 5


@pytest.mark.parametrize("count", [2, 3, 5, 10, 20])
def test_intervals_of_few_prompts_hold_the_true_speed_up(count: int) -> None:
    """Seconds over plain decoding's have the mean 1/2; every fifth answer is short."""
    rng, hits, tries = random.Random(1), 0, 400
    for _ in range(tries):
        lengths = rng.choices([20.0, 160.0], [1, 4], k=count)
        shares = [rng.lognormvariate(math.log(0.5) - 0.3**2 / 2, 0.3) for _ in lengths]
        units = [((n, n * share), (n, n)) for n, share in zip(lengths, shares, strict=True)]
        found = interval(units, speed_ratio)
        hits += found.low < 2 < found.high
    assert 0.9 <= hits / tries <= 0.98


def test_one_prompt_has_no_interval() -> None:
    (made,) = section(rows(count=1)).whole[2:3]
    assert made.speedup.shown("×") == "2.00×"
    assert made.as_dict()["speedup"] == {"value": 2.0, "low": None, "high": None}


def test_a_prompt_without_plain_tokens_is_in_no_ratio() -> None:
    """As one whose record has the limit 0."""
    empty = [row(arm, 9, 0.1, output_ids=[]) for arm in SETTINGS["arms"]]
    with_it, without = (
        {s.arm: s for s in section(found).whole}["copyspec@8"] for found in (rows() + empty, rows())
    )
    assert with_it.macro_speedup == without.macro_speedup
    assert with_it.speedup.value == without.speedup.value


def test_runs_count_by_their_median() -> None:
    found = [row("none", 0, seconds, run=run) for run, seconds in enumerate((1.0, 9.0, 2.0))]
    assert paces(found) == {"s/0": (20, 2.0)}


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float32"}, {"linear layers": "packed"}, {"versions": {"torch": "3"}}],
)
def test_runs_of_another_setting_get_a_section_of_their_own(other: dict[str, Any]) -> None:
    found = sections([rows(), rows(settings=SETTINGS | other)])
    assert [len(made.rows) for made in found] == [20, 20]
    assert [made.settings for made in found] == [SETTINGS, SETTINGS | other]
    assert found[0].title == "m, bfloat16, cpu, 2 threads"


def test_files_of_one_setting_are_put_together() -> None:
    twice = section(rows() + rows(run=1))
    (made,) = sections([rows(), rows()])
    assert {one.run for one in made.rows} == {0, 1}
    assert (made.whole[0].answers, made.whole[0].prompts) == (10, 5)
    assert made.whole == twice.whole
    # Another budget is another arm, whatever its name; further arms, prompts and seeds join.
    found = sections([rows(), rows(budget=8)])
    assert [{row.budget for row in made.rows} for made in found] == [{4}, {8}]
    more = {"arms": ["none", "copyspec@8"], "budgets": [4, 8], "prompts": "1 (x)", "seed": 3}
    arms = [row(arm, 9, 1.0, settings=SETTINGS | more) for arm in ("none", "copyspec@8")]
    (made,) = sections([[one for one in rows() if one.arm != "copyspec@8"], arms])
    assert [summary.arm for summary in made.whole] == SETTINGS["arms"]
    for prompts, said in (([2], "2, 1 run each"), ([1, 2], "2, 1 to 2 runs each")):
        (made,) = sections([[row("none", 1, 1.0)], [row("none", n, 1.0) for n in prompts]])
        assert dict(facts(made))["Prompts"] == said


def test_answers_count_as_the_same_where_they_were_compared_with_this_baseline() -> None:
    alone = SETTINGS | {"arms": ["copyspec@4", "copyspec@8"]}
    others = [row(arm, n, 1.0, settings=alone) for arm in alone["arms"] for n in range(5)]
    (made,) = sections([[one for one in rows() if not one.arm.startswith("copy")], others])
    assert [one.compared for one in made.whole] == [0, 5, 0, 0]


def test_answers_of_one_token_have_no_later_ones() -> None:
    (made,) = sections([[row("none", 1, 1.0, tokens=1)]])
    assert "nan" not in markdown([made])
    (made,) = sections([[row("none", 1, 1.0, tokens=1), row("none", 2, 1.9, tokens=10)]])
    assert made.whole[0].token_ms == pytest.approx(190)


def test_other_prompts_of_the_same_ids_are_kept_apart() -> None:
    others = rows(prompt_ids=[3, 4], settings=SETTINGS | {"prompts": "5 (other)"})
    assert [made.whole[0].prompts for made in sections([rows(), others])] == [5, 5]
    with pytest.raises(OptionError, match="s/0 is one prompt in a and another one in b"):
        compare_files(rows(), others, ("a", "b"))
    # Another tokenizer has other ids for the same prompts; so have later turns.
    compare_files(rows(), rows(prompt_ids=[3, 4]), ("a", "b"))
    for one in others:
        one.turn = 2
    assert len(sections([rows(), others])) == 1


def test_suites_are_summed_and_shown() -> None:
    others = rows(4.0, suite="other")
    for one in others:
        one.id = one.id.replace("s/", "o/")
    made = section(rows() + others)
    assert list(made.tables) == [None, "s", "other"]
    assert [(s.suite, s.arm) for s in made.tables["s"][:1]] == [("s", "none")]
    assert len(made.tables["s"] + made.tables["other"]) == 8
    assert 2 < made.whole[2].speedup.value < 4


def checked(html: str) -> str:
    """Return the text of a page whose tags are in balance, and which loads nothing."""
    left: list[str] = []
    for closing, tag, alone in re.findall(r"<(/?)([a-zA-Z]\w*)[^>]*?(/?)>", html):
        if closing:
            assert left.pop() == tag
        elif not alone and tag not in ("meta", "br", "wbr"):
            left.append(tag)
    assert not left
    assert not re.search(r'(src|href)="(?!#)|@import|url\((?!#)|<script|https?://', html)
    return re.sub(r"<[^>]*>", "", html)


def cost() -> CostTable:
    points = tuple(Point(c, p, 1 + p / 50, 1, 2) for c in (128, 512) for p in (1, 8, 64))
    return CostTable("m", "cpu", "bfloat16", 2, "Some CPU", {}, points, {128: 5.0})


def test_the_page_needs_nothing_else() -> None:
    html = page([section()], cost=cost())
    found = checked(html)
    for wanted in ("Speed-up", "Where the time goes", "Tokens per pass", "Accepted by position",
                   "Accepted by source", "Accepted against passes", "Cost of a pass",
                   "2.00×", "5 of 5"):  # fmt: skip
        assert wanted in found
    assert html.count("<svg viewBox") == html.count('role="img" aria-label=') == 7
    assert Plots(section()).depth() in html  # the same drawing every time
    assert "prefers-color-scheme: dark" in html
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan[a-z]*", "", html)


def test_plots_show_the_answers_of_all_files() -> None:
    whole = Plots(section(rows())).passes()
    files = [[one for one in rows() if (one.arm == "copyspec@8") is last] for last in (False, True)]
    assert Plots(*sections(files)).passes() == whole
    by_prompt = [[one for one in rows() if (one.id == "s/4") is last] for last in (False, True)]
    assert Plots(*sections(by_prompt)).passes() == whole
    assert Plots(section(rows() + rows(run=1))).passes() == whole


@pytest.mark.parametrize("arm", ["none", "hf:generate"])
def test_names_cannot_break_the_page_of_a_lone_arm(arm: str) -> None:
    bad = '<script>alert("x")</script>&'
    settings = SETTINGS | {"model": bad}
    made = section([row(arm, n, 1.0, suite=bad * n, id=bad * n, settings=settings) for n in (1, 2)])
    assert made.baseline == arm
    checked(page([made]))
    assert "<script" not in markdown([made])


def test_an_arm_within_the_noise_is_not_called_faster() -> None:
    made = [row("none", n, 1.0) for n in (1, 2, 3)]
    made += [row("copyspec@8", n, seconds) for n, seconds in ((1, 0.7), (2, 1.2), (3, 1.0))]
    said = "No arm of draftsmith is clearly faster than none: copyspec@8 is"
    slow = [row("none", n, 1.0) for n in (1, 2)] + [row("copyspec@8", n, 2.0) for n in (1, 2)]
    assert said in markdown([section(slow)])
    noisy = [row("copyspec@8", n, seconds) for n, seconds in ((1, 0.5), (2, 1.1), (3, 0.4))]
    sure = [row("copyspec@4", n, 0.8) for n in (1, 2, 3)]
    assert "No arm" not in markdown([section(made[:3] + noisy + sure)])
    assert said in markdown([section(made)])


def test_markdown() -> None:
    text = markdown([section()])
    assert "Measured:" not in text  # by a version that did not note it
    assert "| arm | tokens/s | speed-up |" in text
    assert "copyspec@8 is 2." in text
    assert "times [2." in text
    assert "as fast as hf:generate, with the same tokens in 5 of 5 answers." in text
    assert "2.00× [2.00, 2.00]" in text
    weights = SETTINGS | {"weights": "7998720 (5c26cf6c)"}
    found = rows(settings=weights, began="2026-11-22T08:18:05+00:00", load=0.5)
    found[-1].began, found[-1].load = "2026-11-22T09:01:00+00:00", 1.5
    found[3].divergence, found[3].gap = 2, 0.0
    found[2].divergence, found[2].gap = 2, 0.0625
    text = markdown([section(found)])
    for wanted in (
        "- Model: m: 7,998,720 parameters, checksum 5c26cf6c",
        "- Measured: 2026-11-22 08:18 to 2026-11-22 09:01 UTC",
        "- Machine load: 0.50 to 1.50 per core, median 0.50",
        "4 of 5 (exact ties)",
        "4 of 5 (gap ≤ 0.062)",
    ):
        assert wanted in text


def test_two_files_beside_each_other() -> None:
    before, now = rows(), rows(3.0, settings=SETTINGS | {"threads": 1, "commit": "def"})
    now[2].output_ids = [7]
    found = compare_files(before, now, ("a", "b"))
    by_arm = {one.arm: one for one in found.rows}
    assert by_arm["none"].ratio.value == pytest.approx(1)
    assert by_arm["copyspec@8"].ratio.value > 1.3
    assert (by_arm["copyspec@4"].identical, by_arm["copyspec@8"].identical) == (4, 5)
    assert found.changed == ["threads: 2 there, 1 now", "commit: abc there, def now"]
    assert "threads: 2 in A, 1 in B" in checked(page([], found))
    others = [row("none", 99, 1.0)]
    with pytest.raises(OptionError, match="have no arm and prompt in common"):
        compare_files(before, others, ("a", "b"))


WRONG = line(row("none", 0, 1.0)).replace('"seconds": 1.0', '"seconds": "x"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{oops\n", "line 2: not JSON"),
        ('{"messages": []}\n', "line 2: not a result of `draftsmith bench run`"),
        ('{"arm": "a", "output_ids": [], "format": 9}\n', "line 2: written in format 9, not 1"),
        ('{"arm": "a", "output_ids": [], "format": 1}\n', "line 2: incomplete, it has no 'id'"),
        (WRONG, "line 2: 'seconds' is a str"),
        (WRONG.replace('"x"', "0"), "line 2: 'seconds' is 0"),
        (WRONG.replace('"x"', "1" + 400 * "0"), "line 2: 'seconds' is 1000"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(line(row("none", 0, 1.0)) + text if text else "")
    with pytest.raises(LoadError, match=f"r.jsonl.*{message}"):
        generations.read(path)
    with pytest.raises(LoadError, match="cannot be read: No such file"):
        generations.read(tmp_path / "none.jsonl")


def test_a_torn_end_is_left_out_and_told(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows())
    whole = path.read_text()
    path.write_text(whole + line(rows()[0])[:70])
    done = run_command("bench", "report", str(path))
    assert done.exit_code == 0, done.output
    assert "r.jsonl, which is incomplete" in done.stderr
    assert "--resume" in done.stderr
    assert "5 of 5" in done.stdout
    assert path.read_text() == whole + line(rows()[0])[:70]


def test_without_matplotlib_the_report_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "r.jsonl", rows())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command("bench", "report", str(path)).exit_code == 0
    done = run_command("bench", "report", str(path), "-o", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "pip install 'draftsmith[bench]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", rows()), write(tmp_path / "b.jsonl", rows(3.0))
    table = tmp_path / "cost.json"
    cost().save(table)
    out = tmp_path / "out"
    done = run_command("bench", "report", str(a), "-o", str(out), "--cost", str(table))
    assert done.exit_code == 0, done.output
    assert "copyspec@8" in done.stdout
    assert {p.name for p in out.iterdir()} == {"report.html", "report.md"}
    both = run_command("bench", "report", "--compare", str(a), str(b), "--json")
    assert both.exit_code == 0, both.output
    assert len(json.loads(both.stdout)["compare"]["rows"]) == 4
    lost = run_command("bench", "report", str(a), "--cost", str(table))
    assert (lost.exit_code, "give FILES and --output" in lost.stderr) == (2, True)
    none = run_command("bench", "report")
    assert (none.exit_code, "nothing to report" in none.stderr) == (2, True)


def test_narrow_terminals_get_fewer_columns() -> None:
    heads = ["arm", "tokens/s", "speed-up", "", "memory"]
    rows = [["none", "100", "1×", "", "5 MiB"], ["copyspec", "200", "2×", "", ""]]

    def shown(width: int) -> list[str]:
        return [str(column.header) for column in text_table(heads, rows, width).columns]

    assert shown(200) == shown(36) == ["arm", "tokens/s", "speed-up", "memory"]
    assert shown(35) == ["arm", "tokens/s", "speed-up"]
    assert shown(10) == ["arm", "speed-up"]
