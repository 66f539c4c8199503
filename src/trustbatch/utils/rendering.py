"""Tables of the terminal as HTML, for notebooks."""

import io
from collections.abc import Callable

from rich.console import Console

WIDTH = 120
"""characters of a line"""


def as_html(show: Callable[[Console], None]) -> str:
    """Return what is printed to a console as HTML, with its colors; text is escaped."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
    show(console)
    return console.export_html(
        inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>'
    )
