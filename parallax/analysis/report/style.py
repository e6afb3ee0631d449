"""How the page of a report looks, on light and on dark screens."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --ink: #1d2126; --soft: #5c6670; --line: #dfe2e3; --track: #eef0f0;
  --forward: #2f6db5; --recompute: #d19a2a; --backward: #2b8a78; --theirs: #8a939b;
  --model: #2f6db5; --masked: #8c6bb1; --padding: #b9688e; --repeated: #c0583a; --recomputed: #d19a2a;
  --waiting: #b7bec4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e7e9ea; --soft: #98a2ab; --line: #2d3338; --track: #22272b;
    --forward: #5b9be0; --recompute: #e0b04f; --backward: #4cb5a0; --theirs: #7c868f;
    --model: #5b9be0; --masked: #ab8ed0; --padding: #d387ab; --repeated: #df7f61; --recomputed: #e0b04f;
    --waiting: #59636b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; letter-spacing: -0.015em; }
h2 { font-size: 1.1rem; margin: 3rem 0 0.25rem; letter-spacing: -0.005em; }
p { margin: 0 0 1rem; color: var(--soft); max-width: 46rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1px; margin: 1.75rem 0 0;
  padding: 0; background: var(--line); border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.facts div { background: var(--paper); padding: 0.8rem 1rem; }
.facts dt { color: var(--soft); font-size: 0.8rem; }
.facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; letter-spacing: -0.01em; }
.bars { display: grid; grid-template-columns: max-content minmax(4rem, 1fr) max-content max-content;
  grid-auto-flow: dense; gap: 0.35rem 0.9rem; align-items: center; margin-top: 1rem; }
.bars > .group { grid-column: 1 / -1; font-weight: 600; margin-top: 0.6rem; }
.bars > .value, .bars > .beside { text-align: right; white-space: nowrap; }
.bars > .beside { color: var(--soft); font-size: 0.82rem; }
.bars > .label { grid-column: 1; } .bars > .bar { grid-column: 2; }
.bars > .value { grid-column: 3; } .bars > .beside { grid-column: 4; }
.bars > .sum { font-weight: 600; }
.bar { display: flex; height: 0.85rem; background: var(--track); border-radius: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; flex: none; }
.bar.tall { height: 1.6rem; margin-top: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.25rem; margin: 0.6rem 0 0; padding: 0; list-style: none;
  color: var(--soft); font-size: 0.85rem; }
.legend i, .split i { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 2px; margin-right: 0.45rem; }
.forward { background: var(--forward); } .recompute { background: var(--recompute); }
.backward { background: var(--backward); } .theirs { background: var(--theirs); }
.model { background: var(--model); } .masked { background: var(--masked); }
.padding { background: var(--padding); } .repeated { background: var(--repeated); }
.recomputed { background: var(--recomputed); } .waiting { background: var(--waiting); }
.wide { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th { text-align: left; font-weight: 500; color: var(--soft); }
th, td { padding: 0.28rem 0.9rem 0.28rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
th.number, td.number { text-align: right; }
td.source { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.82rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  .bars { grid-template-columns: minmax(0, 1fr) max-content max-content; grid-auto-flow: row; gap: 0 0.75rem; }
  .bars > .value { grid-column: 2; } .bars > .beside { grid-column: 3; }
  .bars > .bar { grid-column: 1 / -1; margin-bottom: 0.6rem; }
}
"""
