"""A notebook as Markdown: its text, its code, and what the code has printed and plotted."""

from typing import Any

FENCE = "~" * 8


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return the Markdown of a notebook in nbformat 4."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    outputs = [_output(output) for output in cell["outputs"]]
    return [_fenced(source, "python"), *(text for text in outputs if text)]


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        # progress and warnings are for who runs it
        return _fenced("".join(output["text"]), "text") if output["name"] == "stdout" else ""
    data = output["data"]
    if "image/png" in data:
        return f'<img alt="plot" src="data:image/png;base64,{data["image/png"].strip()}">'
    return _fenced("".join(data["text/plain"]), "text")


def _fenced(text: str, language: str) -> str:
    return f"{FENCE}{language}\n{text.rstrip()}\n{FENCE}"
