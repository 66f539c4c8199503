r"""Normalization: one spelling for the many ways to write a formula in LaTeX and Unicode."""

# ruff: noqa: RUF001 (signs that look alike are what this file is about)
import re
import unicodedata

_REPLACED = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "∗": "*", "÷": r"\div ", "∕": "/", "⁄": "/", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "√": r"\sqrt ", "π": r"\pi ", "°": r"^{\circ}", "′": "'", "’": "'", "∅": r"\emptyset ",
    "（": "(", "）": ")", "［": "[", "］": "]", "｛": "{", "｝": "}", "，": ",", "：": ":",
    "；": ";", "＋": "+", "－": "-", "＝": "=", "／": "/", "＊": "*", "＜": "<", "＞": ">",
    "．": ".", "％": r"\%", "、": ",",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ",
    "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|lg|exp|gcd|lcm|sqrt|pi|"
    "infty"
)
_STEPS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\$", r"\\dollar "),
        (r"\$\s*,\s*\$", ";"),  # two formulas are a list
        (r"\$", ""),
        (r"(?<!\\)\\[()\[\]]", " "),  # \( \) \[ \] around a formula
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (r"(?<=\d)(?<!\d{4})(?:,\s*\\!\s*|\{\s*,\s*\})(?=\d{3}(?!\d))", "\\\\thousands "),
        (r"(?<=\d)(?:\\[,;:\s]|~)(?=\d{3}(?!\d))", "\\\\thousands "),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|bf|rm|it|quad|qquad)(?![a-zA-Z])", " "),
        (r"(?<!\\)\\[,;:!>]", " "),
        (r"(?<!\\)\\\s|~", " "),
        (r"(?<=\d),\s+(?=\d{3}(?!\d))", ";"),  # a list: thousands separators have no space after
        (r"(?<=\d)(?:\s+\.\s*|\.\s+)(?=\d)", r"\\point "),  # neither a decimal point nor a product
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:dbinom|tbinom)(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:mbox|mathrm|textrm|textbf|textit|textnormal|mathbf|mathit|operatorname|hbox|mathsf)"
         r"\s*\*?\s*(?=\{)", r"\\text"),
        (r"\\text\s*\{\s*(" + _FUNCTIONS + r")\s*\}", r"\\\1 "),
        (r"\\text\s*\{\s*([ei]|[-+]?[\d.]+)\s*\}", r"\1 "),
        (r"\\text\s*\{\s*d\s*\}\s*(?=[a-zA-Z])", "d"),
        (r"\\frac\s*\{\s*d\s*([a-zA-Z])\s*\}\s*\{\s*d\s*([a-zA-Z])\s*\}", r"\\frac{d\1}{d\2}"),
        (r"(?<![\w\\^}])d([a-zA-Z])\s*/\s*d([a-zA-Z])(?![\w^(])", r"\\frac{d\1}{d\2}"),
        (r"\\mathbb\s+([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}"),
        (r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])", r"\\ge "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])", "|"),
        (r"\\(?:lbrack)(?![a-zA-Z])", "["),
        (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
        (r"\\prime(?![a-zA-Z])|\^\s*\{\s*\\prime\s*\}", "'"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"\\degree "),
        (r"(?<![a-zA-Z\\])(" + _FUNCTIONS + r")(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![a-zA-Z\\])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
        (r"(?<=\{)(\d{1,3}),(\d{3})(?:,(\d{3}))?(?=\})", r"\1\2\3"),
        (r"(?<=\d)e(?=\s+[-+]|[-+]\s)|(?<=\d)\s+e(?=\s*[-+])", "{e}"),  # 2e - 1 is not 0.2
        (r"\*\*", "^"),
        (r"(?<!\\)%", r"\\%"),
        (r"\s+", " "),
    )
]  # fmt: skip
_NEEDLESS_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")


def normalize(text: str) -> str:
    """Return a formula in its canonical spelling, in linear time."""
    text = with_ascii_signs(text)
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").strip()
    return _NEEDLESS_SPACE.sub("", text)


def with_ascii_signs(text: str) -> str:
    """Return a text with ASCII digits, and with ASCII or a LaTeX command for each math symbol."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{run.group().translate(_SUPERSCRIPTS)}}}", text)
    return "".join(_REPLACED.get(c) or _ascii_digit(c) for c in text)


def _ascii_digit(character: str) -> str:
    """Return digits of other scripts as 0 to 9, and any other character unchanged."""
    if character.isascii() or unicodedata.category(character) != "Nd":
        return character
    return str(unicodedata.decimal(character))
