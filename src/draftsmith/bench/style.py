"""The page's style sheet: light and dark, wide and narrow."""

_RULES = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1b1c1e; --soft: #5d6167; --rule: #e3e3de;
  --track: #efefea; --good: #1a7f4b; --warn: #a15c00;
  --a0: #6d7278; --a1: #1f66d1; --a2: #d0590b; --a3: #14855c; --a4: #a3348a; --a5: #6a4bd0;
  --a6: #0b7f92; --a7: #94690a; --a8: #c0304a; --a9: #4d6b16;
  --p0: #8a9099; --p1: #d9902f; --p2: #2f6fce; --p3: #8b5bd0; --p4: #c4c8ce; --p5: #aab0b8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131416; --card: #1b1d20; --ink: #ebecee; --soft: #a0a5ad; --rule: #31343a;
    --track: #26292e; --good: #5fce94; --warn: #f0b35c;
    --a0: #a3a8b0; --a1: #6ea8ff; --a2: #ff9a56; --a3: #4fcf9c; --a4: #ef86d6; --a5: #b19cff;
    --a6: #4fc9dd; --a7: #e0b54a; --a8: #ff8093; --a9: #a9cf5c;
    --p0: #7d848e; --p1: #f0a94e; --p2: #6ea8ff; --p3: #b19cff; --p4: #4a4f57; --p5: #5d636c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 1264px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 1.25rem; margin: 40px 0 2px; }
h3 { font-size: 1rem; margin: 0 0 2px; }
p { margin: 0 0 12px; max-width: 74ch; }
.soft, .note { color: var(--soft); }
.note { font-size: 0.85rem; margin: 0 0 10px; max-width: 110ch; }
.headline { font-size: 1.1rem; margin: 14px 0 16px; max-width: none; }
.cards { columns: 3 340px; column-gap: 20px; margin: 20px 0; }
.card {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 16px 18px; margin: 0 0 20px; break-inside: avoid;
}
.card svg { display: block; width: 100%; height: auto; max-width: 430px; }
.table { overflow-x: auto; margin: 16px 0 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: right; padding: 7px 0 7px 11px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--rule);
  vertical-align: bottom; }
td { border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; }
td small { color: var(--soft); font-size: 0.75rem; }
td.arm { font-weight: 600; white-space: normal; }
.good { color: var(--good); } .warn { color: var(--warn); }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; margin: 8px 0;
  font-size: 0.85rem; }
.key li { display: flex; align-items: center; gap: 6px; }
.key svg { width: 12px; height: 12px; flex: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; font-size: 0.85rem;
  margin: 10px 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
svg text { fill: var(--ink); font-size: 12px; font-family: inherit;
  font-variant-numeric: tabular-nums; }
svg text.tick, svg text.axis { fill: var(--soft); font-size: 11px; }
svg text.group { font-weight: 600; font-size: 13px; }
svg text.name { font-size: 12.5px; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .one { stroke: var(--soft); stroke-width: 1.5; }
svg .track { fill: var(--track); }
svg rect[class] { stroke: none; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .whisker { stroke-width: 3; stroke-linecap: round; opacity: 0.45; }
svg circle { stroke-width: 2; }
svg circle.hollow { fill: var(--card); }
svg circle.faint { opacity: 0.6; }
@media (max-width: 700px) {
  main { padding: 20px 16px 40px; }
  h1 { font-size: 1.4rem; }
  .card { padding: 14px; }
  .table { overflow: visible; }
  table, tbody { display: block; }
  thead { display: none; }
  tr { display: grid; grid-template-columns: 1fr 1fr; column-gap: 22px; padding: 8px 0;
    border-bottom: 1px solid var(--rule); }
  td, td:first-child { border: 0; padding: 1px 0; display: flex; justify-content: space-between;
    gap: 10px; text-align: right; white-space: normal; }
  td.arm, td.long { grid-column: 1 / -1; }
  td.arm { display: block; text-align: left; padding-bottom: 2px; overflow-wrap: anywhere; }
  td:not(.arm)::before { content: attr(data-head); color: var(--soft); text-align: left; }
  td:not(.arm):empty { display: none; }
}
""".strip()

_COLOURS = "".join(
    f"\nsvg .a{i} {{ stroke: var(--a{i}); }} svg circle.a{i}:not(.hollow), "
    f"svg rect.a{i} {{ fill: var(--a{i}); }}"
    for i in range(10)
)
_PHASES = "".join(f"\nsvg .p{i} {{ fill: var(--p{i}); }}" for i in range(6))

CSS = _RULES + _COLOURS + _PHASES
