"""Formulas as MathML, which browsers draw on a page without scripts, and the font for them."""

import re
from html import unescape
from importlib.resources import files
from pathlib import Path

from latex2mathml.converter import convert

# phones and servers have no font with the sizes of fractions, sums and brackets; ziamath brings one
FONT = Path(str(files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"))

_MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
# the converter sets log as if it were a product of letters: "A log x" has spaces, "log(x)" none
_FUNCTION = re.compile(r"<mi>(?P<name>log|exp)</mi>(?P<open><mo [^>]*>&#x00028;)?")


class FormulaError(ValueError):
    """A formula has a command that can't be converted."""


def with_formulas(html: str) -> str:
    """Replace the formulas that Markdown has marked."""
    return _MARKED.sub(lambda match: _math(unescape(match["latex"]), match["tag"]), html)


def _math(latex: str, tag: str) -> str:
    math = convert(latex.strip(), display="block" if tag == "div" else "inline")
    # the converter shows a command that it does not know by its name
    if "\\" in unescape(math):
        raise FormulaError(f"Write ${latex.strip()}$ with commands that latex2mathml knows.")
    return f'<{tag} class="formula">{_FUNCTION.sub(_function, math)}</{tag}>'


def _function(match: re.Match[str]) -> str:
    after, argument = ("0", match["open"]) if match["open"] else ("0.17em", "")
    return f'<mo form="prefix" lspace="0.17em" rspace="{after}">{match["name"]}</mo>{argument}'
