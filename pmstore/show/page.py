"""The page around a report: its style and its script. It asks nothing of any network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfbf9; --panel: #ffffff; --ink: #1d2126; --dim: #5c6670; --rule: #d9dde1;
  --a: #1f5fa8; --b: #b3541e; --commit: #2e7d4f; --start: #8a3ffc; --decision: #b3541e;
  --focus: #1f5fa8; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --panel: #1c2024; --ink: #e6e8ea; --dim: #9aa4ae; --rule: #343b42;
  --a: #7ab3f5; --b: #f0a06a; --commit: #6fcf97; --start: #c3a1ff; --decision: #f0a06a;
  --focus: #7ab3f5; --bad: #ff8a80; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem clamp(.75rem, 3vw, 2.5rem) 4rem; max-width: 110rem;
  background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
h3 { font-size: .95rem; margin: 0 0 .4rem; font-weight: 600; overflow-wrap: anywhere }
p { margin: .3rem 0 } .dim, .none { color: var(--dim) }
a { color: var(--a) } nav a { margin-right: 1rem; white-space: nowrap }
.skip { position: absolute; left: -99rem } .skip:focus { position: static }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)) }
.panel { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  padding: .8rem 1rem; min-width: 0 }
.chart { width: 100%; height: auto; display: block; overflow: visible }
.chart text { font: 11px system-ui, sans-serif; fill: var(--dim) }
.end { text-anchor: end } .mid { text-anchor: middle }
path.grid { stroke: var(--rule); stroke-width: 1 } .axis { stroke: var(--dim) }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round }
.dot { stroke-width: 6 } .band { stroke: none; opacity: .18 }
.line.a { stroke: var(--a) } .line.b { stroke: var(--b); stroke-width: 1.2 }
.band.a { fill: var(--a) }
.mark { fill: none; stroke-width: 1 } .mark.commit { stroke: var(--commit) }
.mark.decision { stroke: var(--decision); stroke-width: 2 }
.mark.start { stroke: var(--start); stroke-dasharray: 4 3 }
path.cursor { stroke: var(--dim); stroke-width: 1 } circle.cursor { fill: var(--ink) }
output { display: block; min-height: 1.5em; font-variant-numeric: tabular-nums; color: var(--dim) }
.key { display: inline-block; width: 1.1em; height: 0; border-top: 3px solid; margin-right: .3em;
  vertical-align: middle } .key.a { color: var(--a) } .key.b { color: var(--b) }
.key.commit { color: var(--commit) } .key.start { color: var(--start) }
.key.decision { color: var(--decision) } .legend span { margin-right: 1rem }
.scroll { overflow: auto; max-height: 26rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
caption { text-align: left; color: var(--dim); padding-bottom: .3rem }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap }
th { font-weight: 600; position: sticky; top: 0; background: var(--panel) }
th.text, td.text { text-align: left } td.long { white-space: normal; overflow-wrap: anywhere }
td.bad { color: var(--bad) }
.heap { width: 100%; height: 2rem; display: block; margin: .2rem 0 }
.heap rect { fill: var(--a) } .heap .frame { fill: none; stroke: var(--rule) }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px }
@media print { .scroll { max-height: none } }
"""

SCRIPT = """
const charts = JSON.parse(document.getElementById("data").textContent).charts;
function show(svg, index) {
  const at = charts[svg.id], last = at.x.length - 1;
  if (last < 0) return;
  const i = Math.max(0, Math.min(last, index));
  svg.dataset.index = i;
  const [line, dot] = svg.querySelectorAll(".cursor");
  line.setAttribute("d", `M${at.x[i]} TOPVFOOT`);
  dot.setAttribute("cx", at.x[i]); dot.setAttribute("cy", at.y[i]);
  dot.setAttribute("r", 3.5);
  document.getElementById(svg.id + "-out").textContent = at.text[i];
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const mid = (low + high) >> 1;
    if (xs[mid] < x) low = mid; else high = mid;
  }
  return x - xs[low] < xs[high] - x ? low : high;
}
for (const svg of document.querySelectorAll("svg.chart")) {
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    show(svg, nearest(charts[svg.id].x, (event.clientX - box.left) * WIDE / box.width));
  });
  svg.addEventListener("keydown", event => {
    const last = charts[svg.id].x.length - 1, now = +(svg.dataset.index ?? last + 1);
    const far = Math.max(1, Math.round(last / 10));
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last,
      PageUp: now - far, PageDown: now + far }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(svg, to);
  });
}
function point() { // #loss-0@12: a link to a point
  const [id, index] = location.hash.slice(1).split("@");
  const svg = index === undefined ? null : document.getElementById(id);
  if (svg && charts[id]) { show(svg, +index); svg.scrollIntoView() }
}
addEventListener("hashchange", point); point();
document.documentElement.dataset.ready = Object.keys(charts).length;
"""


BEGIN = b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>pmstore report: '
"""What every report begins with."""


def document(title: str, body: str, data: Mapping[str, Any], box: tuple[int, int, int]) -> str:
    """Returns the whole HTML file. title: what is reported on. box: of charts: their width, and
    where their axes begin and end."""
    wide, top, foot = map(str, box)
    script = SCRIPT.replace("WIDE", wide).replace("TOP", top).replace("FOOT", foot)
    # no name in a store may end the script
    told = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f"{BEGIN.decode()}{escape(title)}</title>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>{body}\n"
        f'<script type="application/json" id="data">{told}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def table(
    caption: str, titles: Iterable[str], rows: Iterable[Iterable[object]], text: str = ""
) -> str:
    """Returns the HTML of a table. text: for each column "t" if it is text, "l" if it is long, else
    a number."""
    kinds = {"t": ' class="text"', "l": ' class="text long"'}
    head, body = list(titles), [list(map(str, row)) for row in rows]
    if not body:
        return '<p class="none">None.</p>'
    of = [kinds.get(kind, "") for kind in text.ljust(len(head))]
    top = "".join(
        f'<th scope="col"{kind}>{escape(title)}</th>' for title, kind in zip(head, of, strict=True)
    )
    lines = (
        "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, of, strict=True))
        for row in body
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>"
        + "".join(f"<tr>{line}</tr>" for line in lines)
        + "</tbody></table></div>"
    )
