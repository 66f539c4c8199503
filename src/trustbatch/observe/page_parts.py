"""Parts of all HTML pages: the page with its content security policy, and escaped values.

Text from a run (names, prompts, completions, configuration, errors) must pass through `text` before
it reaches a page.
"""

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib import resources
from typing import Any

from trustbatch.observe.charts import swatch
from trustbatch.observe.report_data import number

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src '{digest}'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""of a written page: it loads nothing, and runs no script but its own"""
CHART_SCRIPTS = (
    "chart_axes.js",
    "chart_lines.js",
    "chart_export.js",
    "charts.js",
    "chart_toolbar.js",
)
DASH = "\N{EN DASH}"
# Control characters have no meaning in HTML; their pictures show what the model really wrote.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}


def html_page(
    *, title: str, header: str, sections: Sequence[str], style: str = "", script: str = ""
) -> str:
    """Return a self-contained page that may not access the network.

    `title` is text, `header` and `sections` are HTML, `style` and `script` are added to those of
    all pages.
    """
    script = "\n" + "".join(map(asset, (*CHART_SCRIPTS, "report.js"))) + script
    policy = POLICY.format(digest=_digest(script))
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=False)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{text(title)}</title>",
            f"<style>\n{asset('report.css')}{style}</style>\n</head>\n<body>",
            f"<header>{header}</header>\n<main>",
            "<noscript><p>The charts of this page need JavaScript.</p></noscript>",
            *sections,
            f"</main>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _digest(script: str) -> str:
    """Return how a policy names the one script that may run, so that no other can."""
    return f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"


def asset(name: str, package: str = "trustbatch.observe") -> str:
    """Return a stylesheet or script that is part of the package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def as_bytes(page: str) -> bytes:
    """Encode a page; a completion may contain a lone surrogate, which UTF-8 can't encode."""
    return page.encode("utf-8", errors="replace")


def text(value: object) -> str:
    """Return any value as escaped text."""
    return escape(str(value).translate(_CONTROL_PICTURES))


def figure(value: object) -> str:
    """Format a number with four significant digits; a dash for anything else."""
    found = number(value)
    if not math.isfinite(found):
        return DASH
    if found == int(found) and abs(found) < 1e6:
        return f"{int(found):,}"
    return f"{found:,.0f}" if 1e3 <= abs(found) < 1e6 else f"{found:.4g}"


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested tables as dotted keys and formatted values."""
    leaves: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, default=str)
            leaves.append((f"{prefix}{key}", shown))
    return leaves


def settings_block(config_text: str, environment: dict[str, Any]) -> str:
    """Return a run's configuration next to its environment."""
    config = f"<pre>{text(config_text)}</pre>" if config_text else "<p>Not recorded.</p>"
    rows = "".join(
        f'<tr><th scope="row">{text(key)}</th><td>{text(value)}</td></tr>'
        for key, value in flatten(environment)
    )
    table = f'<table class="environment">{rows}</table>' if rows else "<p>Not recorded.</p>"
    return (
        f'<div class="settings"><div><h4>Configuration</h4>{config}</div>'
        f"<div><h4>Environment</h4>{table}</div></div>"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int) -> str:
    """Return a table of texts; columns after the first `num_words` are numbers."""
    heads = "".join(
        f'<th scope="col"{numeric(place >= num_words)}>{text(heading)}</th>'
        for place, heading in enumerate(headings)
    )
    lines = "\n".join(
        "<tr>"
        + "".join(
            f"<td{numeric(place >= num_words)}>{text(cell)}</td>" for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def details(curve: int, name: str, inner: str) -> str:
    """Return a part that opens on a click, with the name and the color of a curve."""
    return f"<details><summary>{swatch(curve)}<span>{text(name)}</span></summary>{inner}</details>"


def numeric(is_number: bool) -> str:
    """Return the class attribute of a table cell with a number."""
    return ' class="number"' if is_number else ""
