"""The report's HTML: one file, styles inline, no script, no outside address. All text is escaped: chats are untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{{ name }} · run report</title>
<style>
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #5c6670; --line: #d5dae0; --card: #f5f7f9;
  --good: #1f7a4d; --bad: #b3362c; --accent: #2f6fc7; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --ink: #e4e8ec; --soft: #9aa5b0; --line: #39424c; --card: #1d2228;
  --good: #5cc48e; --bad: #ef8377; --accent: #7fb0f2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 1.75rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 44px 0 12px; padding-top: 12px; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 26px 0 6px; }
p { margin: 6px 0; } .soft, figcaption, caption { color: var(--soft); font-size: 0.86rem; }
nav { margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 16px; } a { color: var(--accent); }
dl.facts { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 16px 0 0; }
dl.facts div { min-width: 0; } dt { color: var(--soft); font-size: 0.8rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.status span { margin-right: 14px; } .yes { color: var(--good); } .no { color: var(--soft); }
.verdict { background: var(--card); border-left: 4px solid var(--accent); padding: 10px 14px; border-radius: 0 6px 6px 0; margin: 14px 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 10px 0 4px; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
caption { text-align: left; caption-side: bottom; padding-top: 6px; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
td.left, th.left { text-align: left; } .clear { font-weight: 700; }
.interval { display: block; color: var(--soft); font-size: 0.8rem; } thead th { vertical-align: bottom; white-space: normal; }
figure { margin: 8px 0 26px; } figure svg { width: 100%; height: auto; display: block; }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 4px 28px; align-items: start; }
.sample { border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; margin: 14px 0; }
.sample h3 { margin: 0 0 6px; } .cols { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
@media (max-width: 720px) { .cols { grid-template-columns: 1fr; } }
.cols > div { min-width: 0; }
pre { background: var(--card); border-radius: 6px; padding: 10px; margin: 4px 0; font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 22rem; overflow-y: auto; }
.chips span { display: inline-block; background: var(--card); border-radius: 10px; padding: 1px 9px; margin: 2px 4px 2px 0; font-size: 0.82rem; }
ul.errors { color: var(--bad); margin: 4px 0; padding-left: 20px; font-size: 0.88rem; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--accent); } .none { color: var(--soft); font-style: italic; }
</style>
</head>
<body>
<main>
<h1>{{ name }}</h1>
<p class="soft">Run report, made {{ made_at }}</p>
<p class="status">{% for label, done in status %}<span class="{{ 'yes' if done else 'no' }}">{{ '✓' if done else '○' }} {{ label }}{{ '' if done else ': not run' }}</span>{% endfor %}</p>
{% if facts %}<dl class="facts">{% for label, value in facts %}<div><dt>{{ label }}</dt><dd>{{ value }}</dd></div>{% endfor %}</dl>{% endif %}
<nav><a href="#results">Results</a>{% for key, (heading, drawings) in sections.items() %}{% if key != "evaluation" %}<a href="#{{ key }}">{{ heading }}</a>{% endif %}{% endfor %}<a href="#samples">Samples</a><a href="#configuration">Configuration</a></nav>

{% macro results(table, note) %}
<div class="wide"><table>
<thead><tr><th>Arm</th><th>Dialogues</th>{% for label, better in table.columns %}<th>{{ label }}{{ ' ↑' if better > 0 else (' ↓' if better < 0 else '') }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr><td>{{ row.arm }}</td><td>{{ row.num_dialogues }}</td>{% for mean, interval in row["cells"] %}<td>{{ mean }}{% if interval %}<span class="interval">{{ interval }}</span>{% endif %}</td>{% endfor %}</tr>{% endfor %}</tbody>
<caption>{{ note }}</caption>
</table></div>
{% endmacro %}
{% macro figures(drawings) %}
{% for drawing in drawings %}<figure id="figure-{{ drawing.name }}"><h3>{{ drawing.title }}</h3>{{ inline(drawing.svg) }}<figcaption>{{ drawing.caption }}</figcaption></figure>{% endfor %}
{% endmacro %}

<h2 id="results">Results on held-out dialogues</h2>
{% if headline %}
{% if verdict %}<p class="verdict">{{ verdict }}</p>{% endif %}
{{ results(headline, "Mean over dialogues with its 95 % bootstrap interval. ↑ higher is better, ↓ lower is better; – not measured. All arms share one retrieval budget.") }}
{% if differences %}
<h3>Paired differences</h3>
<div class="wide"><table>
<thead><tr><th>Difference</th><th class="left">Metric</th><th>Mean [95 % interval]</th><th>Dialogues</th></tr></thead>
<tbody>{% for row in differences %}<tr><td>{{ row.pair }}</td><td class="left">{{ row.metric }}</td><td{% if row.excludes_zero %} class="clear"{% endif %}>{{ row.text }}</td><td>{{ row.num_dialogues }}</td></tr>{% endfor %}</tbody>
<caption>Same dialogues on both sides. Bold: the interval leaves out 0.</caption>
</table></div>
{% endif %}
{% if details %}<h3>Further measures</h3>{{ results(details, "Error shares are taken among records whose content matches the reference.") }}{% endif %}
{% if failures %}
<h3>Where wrong answers went wrong</h3>
<div class="wide"><table>
<thead><tr><th>Arm</th><th>Questions</th><th>Not written well</th><th>Not retrieved</th><th>Shown, still wrong</th><th>Other</th></tr></thead>
<tbody>{% for row in failures %}<tr><td>{{ row.arm }}</td><td>{{ row.questions }}</td><td>{{ row.formation }}</td><td>{{ row.retrieval }}</td><td>{{ row.answer }}</td><td>{{ row.other }}</td></tr>{% endfor %}</tbody>
</table></div>
{% endif %}
{% if budget %}<p class="soft">Retrieval budget: {% for label, value in budget %}{{ label }} {{ value }}{{ '' if loop.last else ' · ' }}{% endfor %}</p>{% endif %}
{{ figures(sections.evaluation[1]) }}
{% else %}<p class="none">Evaluation: not run.</p>{% endif %}

{% for key, (heading, drawings) in sections.items() if key != "evaluation" %}
<h2 id="{{ key }}">{{ heading }}</h2>
{% if key == "sft" and sft_summary %}<dl class="facts">{% for label, value in sft_summary %}<div><dt>{{ label }}</dt><dd>{{ value }}</dd></div>{% endfor %}</dl>{% endif %}
{% if drawings %}{{ figures(drawings) }}{% else %}<p class="none">{{ heading }}: not run.</p>{% endif %}
{% endfor %}

<h2 id="samples">Sample completions beside their reference</h2>
{% if samples %}
<p class="soft">From the first, a middle and the last update: the sampled step with the highest and the one with the lowest return.</p>
{% for sample in samples %}
<div class="sample">
<h3>Update {{ sample.step }} · {{ sample.dialogue_id }} · trajectory {{ sample.trajectory_index }} · segment {{ sample.segment_index }}</h3>
<p class="chips"><span>return {{ sample.return }}</span><span>advantage {{ sample.advantage }}</span>{% for label, value in sample.rewards %}<span>{{ label }} {{ value }}</span>{% endfor %}</p>
{% if sample.errors %}<ul class="errors">{% for error in sample.errors %}<li>{{ error }}</li>{% endfor %}</ul>{% endif %}
<div class="cols"><div><p class="soft">Completion</p><pre>{{ sample.completion or "(empty)" }}</pre></div><div><p class="soft">Reference</p><pre>{{ sample.reference or "(none)" }}</pre></div></div>
<details><summary>End of the prompt</summary><pre>{{ sample.prompt or "(not recorded)" }}</pre></details>
</div>
{% endfor %}
{% else %}<p class="none">Samples: not run.</p>{% endif %}

<h2 id="configuration">Configuration</h2>
{% if config_text %}<details><summary>Resolved configuration</summary><pre>{{ config_text }}</pre></details>{% else %}<p class="none">No configuration was found beside this run.</p>{% endif %}
</main>
</body>
</html>
"""

_ENVIRONMENT = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render_page(content: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        content: What `report.page_content` gives. Drawings carry SVG made by us and are put in as they are; everything else
            is escaped.
    """
    return _ENVIRONMENT.from_string(_TEMPLATE).render(**content, inline=Markup)
