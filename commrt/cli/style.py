# SPDX-License-Identifier: Apache-2.0
"""The style of ``commrt train --report``'s page: colours as variables, once light and once dark."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root {
  --page: #ffffff; --ink: #1c2024; --soft: #5c6670; --rule: #d8dde2; --band: #f3f5f7; --head: #eef1f4; --mark: #2f6fb5;
  --line-0: #2f6fb5; --line-1: #c4572b; --line-2: #3b8a4d; --line-3: #8a4fb0; --line-4: #a3812b; --line-5: #b03a5b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --ink: #e4e8eb; --soft: #9aa5af; --rule: #3a424a; --band: #1e2327; --head: #23292e;
    --mark: #6ba6e8;
    --line-0: #6ba6e8; --line-1: #ef8d61; --line-2: #74c285; --line-3: #c18fe2; --line-4: #d8b75c; --line-5: #e57d9c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
header p, section > p { color: var(--soft); margin: 0 0 1rem; }
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .75rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th[scope=row] { text-align: left; font-weight: 500; }
thead th { background: var(--head); font-weight: 600; }
thead tr:has(th:only-child), thead:not(:has(th:not(:empty))) { display: none; }
td code { white-space: pre-wrap; overflow-wrap: anywhere; text-align: left; }
td:has(code) { text-align: left; white-space: normal; }
td.shade { background: color-mix(in srgb, var(--mark) calc(var(--share) * 60%), transparent); text-align: center; }
figure { margin: 1rem 0 1.5rem; }
figcaption { font-size: .9rem; color: var(--soft); margin-bottom: .35rem; }
.key { margin-left: 1rem; white-space: nowrap; color: var(--ink); }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem; }
svg { display: block; width: 100%; height: auto; color: var(--ink); }
svg text { fill: var(--ink); }
svg.chart { min-width: 34rem; font: 12px system-ui, "DejaVu Sans", sans-serif; }
svg .rule { stroke: var(--rule); stroke-width: 1; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg.chart text { fill: var(--soft); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .band { opacity: .18; }
svg .spot { opacity: 0; }
svg .spot:hover { opacity: 1; }
svg .cell { fill: var(--mark); }
svg .cell.none { fill: var(--line-1); opacity: .4; }
svg .cell.unknown { fill: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1.25rem; margin: 0; font-size: .9rem; }
dt { font-weight: 600; }
dd { margin: 0; color: var(--soft); }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; } }
"""
