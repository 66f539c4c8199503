"""A notebook as Markdown: its text, its code, and what the code has printed and plotted."""

import re
from itertools import groupby
from typing import Any

FENCE = "~" * 8
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return the Markdown of a notebook in nbformat 4."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    # progress and warnings are for who runs it
    shown = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    parts = [_fenced(source, "python")]
    for has_image, outputs in groupby(shown, key=lambda output: "image/png" in _data(output)):
        if has_image:
            parts += [_image("".join(_data(output)["image/png"])) for output in outputs]
        else:
            parts.append(_fenced("\n".join(map(_text, outputs)), "text"))
    return parts


def _data(output: dict[str, Any]) -> dict[str, Any]:
    return output.get("data", {})


def _text(output: dict[str, Any]) -> str:
    text = "".join(output["text"] if "text" in output else _data(output)["text/plain"])
    return _COLORS.sub("", text).rstrip()


def _image(png: str) -> str:
    return f'<img alt="plot" src="data:image/png;base64,{"".join(png.split())}">'


def _fenced(text: str, language: str) -> str:
    return f"{FENCE}{language}\n{text.rstrip()}\n{FENCE}"
