"""The page's template: one file, nothing fetched; light and dark, wide and narrow."""

from string import Template

STYLE = """
:root {
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  --paper: #ffffff; --soft: #f5f5f2; --ink: #222222; --faint: #666666; --grid: #e4e4e0; --edge: #d5d5cf;
  --c-softmax: #2f6db3; --c-one-vs-each: #c8650f; --c-sampled-softmax: #2e8b57; --c-probit: #7b52ab;
  --c-logistic: #c0392b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181b; --soft: #1f2226; --ink: #e6e6e3; --faint: #a3a6aa; --grid: #33373c; --edge: #41464c;
    --c-softmax: #6aa9ee; --c-one-vs-each: #f0a050; --c-sampled-softmax: #63c48f; --c-probit: #b996ea;
    --c-logistic: #f0857a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 var(--font); }
main { max-width: 1180px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .3rem; }
p { margin: .35rem 0 .9rem; max-width: 76ch; }
.faint, .note, footer { color: var(--faint); font-size: .88rem; }
.note { overflow-wrap: anywhere; margin: .25rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .35rem 1.1rem; margin: 1rem 0 0; font-size: .92rem; }
a { color: var(--c-softmax); text-underline-offset: .15em; }
.scroll { overflow-x: auto; margin: .6rem 0 .4rem; border: 1px solid var(--edge); border-radius: 8px; }
.scroll:focus-visible { outline: 2px solid var(--c-softmax); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; text-align: right; white-space: nowrap; }
thead th, thead td { font-weight: 600; background: var(--soft); vertical-align: bottom; }
thead tr.groups th { text-align: center; padding-bottom: 0; }
thead tr.groups th { border-left: 1px solid var(--grid); }
tbody tr { border-top: 1px solid var(--grid); }
th.name, td.name { text-align: left; }
th.name.pin { position: sticky; left: 0; background: var(--paper); }
tbody th.name.pin { font-weight: 400; }
tr.heading th { text-align: left; padding-top: .7rem; border-top: 1px solid var(--edge); }
tr.heading + tr { border-top: 0; }
tr.heading th span { position: sticky; left: .7rem; }
thead th.name.pin { background: var(--soft); }
td.start, th.start { border-left: 1px solid var(--grid); }
td.ours { font-weight: 600; }
td.difference { color: var(--faint); }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 1rem; }
.panels figure { margin: 0; padding: .5rem; border: 1px solid var(--edge); border-radius: 8px; }
.panels svg { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: .4rem 0 .8rem; padding: 0;
  font-size: .9rem; }
.legend i { display: inline-block; width: 1.6em; border-top: 3px solid currentColor; margin-right: .45em;
  vertical-align: middle; }
.legend i.dashed { border-top: 2px dashed currentColor; }
.legend i.ring { width: .7em; height: .7em; border: 2px solid currentColor; border-radius: 50%; }
.settings { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 0 2rem; }
dl { margin: .4rem 0; font-size: .9rem; }
dt { color: var(--faint); }
dd { margin: 0 0 .45rem; overflow-wrap: anywhere; }
code { font-family: ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; font-size: .88em; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: 8px; overflow-x: auto; }
@media (max-width: 600px) { main { padding: 1.2rem .9rem 3rem; } h1 { font-size: 1.4rem; } th, td { padding: .34rem .55rem; } }
@media print { .scroll { overflow: visible; border: 0; } table { font-size: .7rem; } }
"""  # noqa: E501

PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="augment-reduce $version">
<title>Augment and Reduce, reproduced</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<main>
<header>
<h1>Augment and Reduce, reproduced</h1>
<p>Section 4 of Ruiz, Titsias, Dieng and Blei, <cite>Augment and Reduce: Stochastic Inference for Large Categorical
Distributions</cite> (ICML 2018), run again with augment-reduce $version: what the paper printed, what came out here,
and the difference.</p>
<p class="faint">$summary</p>
<nav aria-label="On this page">$links</nav>
</header>
$sections
<footer>
<p>Written by <code>augment-reduce reproduce</code> on $written. The same numbers are in results.json and the csv files
beside this page.</p>
</footer>
</main>
</body>
</html>
"""
)
