r"""The form of an answer: a number, a list, a tuple, an interval, a matrix, an equation, words.

Two answers are equal if they have the same form and their parts are equal; so (1,2) is neither
[1,2] nor 1,2. A list without brackets and one in braces are sets of answers: their order is free.
"""

import re
from dataclasses import dataclass, replace

MAX_ITEMS = 64
MAX_DEPTH = 40
_OPENING, _CLOSING = "([{", ")]}"
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv)(?![a-zA-Z])|[=<>]")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix)\}(.*)\\end\{\1\}")
_THOUSANDS = re.compile(r"(?<![\d,.^_])\d{1,3}(?:(?:,|\\thousands ?| )\d{3})+(?![\d,])")
_WORD_LIST = re.compile(r"\\text\{ ?,? ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_BASE = re.compile(r"(?<=[0-9A-Fa-f])_\{?\(?(\d{1,2})\)?\}?$|(?<=\d)_\{?\\text\{ ?(\w+) ?\}\}?$")
_UNIT = re.compile(
    r"(?P<text>\\text\{(?P<name>[^{}]*)\})(?:\^\{?(?P<power>[23])\}?)?$"
    r"|(?P<degree>\\degree ?)$|(?P<percent> ?\\%|\\text\{ ?percent ?\}| ?percent)$"
)
_COUNTED = (
    r"(?<= )(?:(?:(?:different|distinct|possible) )?(?:(?:way|outcome|arrangement|permutation|"
    r"combination|solution|student|number|integer|point|triangle|digit|value|case|element|set|"
    r"subset|function|path|game|team|player|coin|ball|card|marble|apple|orange|cookie|book|ticket|"
    r"car|house|tree|page|question|problem|row|column|tile|block|piece|slice|item|step|boy|girl|"
    r"word|letter|edge|side|face|divisor|factor|term|prime|person|animal|dog|cat|chicken|flower|"
    r"pencil|box|bag|cup|bottle|glass|stamp|toy|egg|gallon|passenger|guest|member)(?:e?s)?|"
    r"possibilit(?:y|ies)|people|children|men|women|vertices|candies|cherries|strawberries))"
)
"""what answers count, where it is written without \text"""
_PLAIN_UNIT = re.compile(
    r"(?<=[\d.}])\s?(?P<name>(?:square |sq |cubic |cu )?(?:mm|cm|km|kg|mg|ml|ft|yd|mi|mph|lbs?|"
    r"inch(?:es)?|feet|foot|yards?|miles?|met(?:er|re)s?|centimet(?:er|re)s?|kilomet(?:er|re)s?|"
    r"units?|degrees?|radians?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|dollars?|"
    r"cents?|euros?|pounds?|grams?|kilograms?|lit(?:er|re)s?|"
    + _COUNTED
    + r"))(?:\^\{?(?P<power>[23])\}?)?$"
)
_NUMBER_IN_TEXT = re.compile(r"^\\text\{ ?(-?\d+(?:\.\d+)?)( [^{}\d]*)\}$")
_MIXED = re.compile(r"^(-?\d+) (\d+)/(\d+)$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
NOT_UNITS = frozenset(
    [
        "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
        "eleven", "twelve", "hundred", "hundreds", "thousand", "thousands", "million",
        "millions", "billion", "billions", "trillion", "trillions", "dozen", "dozens", "half",
        "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth",
        "fifths", "tenth", "tenths", "percent", "percentage", "times", "squared", "cubed",
        "factorial", "mod", "modulo", "base", "plus", "minus", "over", "divided", "of", "or",
        "and", "to", "not", "no", "more", "less", "than", "least", "most", "is", "equals",
        "wrong", "false", "incorrect", "pair", "pairs", "score", "gross", "thirteen", "fourteen",
        "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty",
        "fifty", "sixty", "seventy", "eighty", "ninety", "lakh", "lakhs", "crore", "crores", "bn",
        "mn", "never", "neither", "nor", "non", "excluded", "excluding", "exclusive", "except",
        "without", "unless", "if", "when", "where", "for", "negative", "inverse", "inverted",
        "opposite", "reciprocal", "negated", "root", "repeating", "recurring", "above", "below",
        "under", "fewer", "greater", "smaller", "larger", "tens", "ones", "mil", "mill", "bil",
        "tril", "tn", "trn", "grand", "lac", "lacs", "arab", "googol", "googols", "myriad",
        "myriads", "fold", "double", "doubled", "twice", "triple", "tripled", "halved", "but"
    ]
)  # fmt: skip
"""words after a number that change its value, or may"""
_FRACTION = re.compile(r"(?<!mon)(?<!leng)(?<!wid)(?<!dep)ths?$|illions?$|illiards?$|fold$")
_LETTERS = frozenset("mgshlnjwv")
"""units of one letter; any other letter is a variable, or an abbreviation such as k for thousand"""


@dataclass(frozen=True, slots=True)
class Form:
    """An answer, or a part of one.

    `kind` is "scalar", "list", "union", "ratio", a pair of brackets such as "[)", the shape of a
    matrix, or the signs of a relation such as "=" or "<,<". `text` is the text of a scalar, or the
    variable that a set of values belongs to.
    """

    kind: str
    text: str = ""
    items: tuple["Form", ...] = ()
    unit: str = ""
    base: str = ""
    is_percent: bool = False


def parse_form(text: str, *, inside: bool = False) -> Form:
    """Return the form of a normalized answer; `inside` brackets, commas never mark thousands."""
    if not inside:
        if _depth(text) > MAX_DEPTH:
            return Form("scalar", text)
        before = re.match(r"[^(\[{]*", text)
        end = before.end() if before else 0
        text = _THOUSANDS.sub(_digits, text[:end]) + text[end:]
    text = _unwrapped(text.replace(r"\thousands ", "").replace(r"\thousands", ""))
    parts = _split(_WORD_LIST.sub(",", text), ",;")
    if len(parts) > 1:
        return _many("list", [part for part in parts if part.strip()])
    return _single(text)


def _digits(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match.group())


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _single(text: str) -> Form:
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        return _matrix(matrix.group(1), matrix.group(2))
    relation = _relation(text)
    if relation is not None:
        return relation
    pieces = _split_command(text, r"\cup")
    if len(pieces) > 1:
        return _many("union", pieces)
    bracketed = _bracketed(text)
    if bracketed is not None:
        return bracketed
    if max(map(text.count, (r"\pm", r"\mp"))) == 1:  # several signs may or may not be coupled
        plus = text.replace(r"\pm", "+").replace(r"\mp", "-")
        minus = text.replace(r"\pm", "-").replace(r"\mp", "+")
        return _many("list", [plus, minus])
    ratio = _split(text, ":")
    if len(ratio) > 1:
        return _many("ratio", ratio)
    return _scalar(text)


def _many(kind: str, texts: list[str]) -> Form:
    if len(texts) > MAX_ITEMS:
        return Form("scalar", ",".join(texts))
    items: list[Form] = []
    for text in texts:
        item = parse_form(text, inside=True)
        # 1, \pm 2 is a list of three; a set within a set is a single element
        is_flat = kind == item.kind == "list" and r"\{" not in text
        items += item.items if is_flat else (item,)
    return Form(kind, items=tuple(items))


def _matrix(environment: str, content: str) -> Form:
    rows = [_split(row, "&") for row in re.split(r"\\\\", content) if row.strip()]
    if not rows or len({len(row) for row in rows}) != 1:
        return Form("scalar", content)
    # round and square brackets denote the same matrix; bars denote a determinant
    style = "matrix" if environment in ("pmatrix", "bmatrix", "matrix") else environment
    cells = tuple(parse_form(cell, inside=True) for row in rows for cell in row)
    return Form(f"{style} {len(rows)}x{len(rows[0])}", items=cells)


def _relation(text: str) -> Form | None:
    parts, signs, start, depth = [], [], 0, 0
    for match in re.finditer(r"\\begin|\\end|\\[{}]|[()\[\]{}]|" + _RELATION.pattern, text):
        token = match.group()
        if token[-1] in _OPENING or token == r"\begin":
            depth += 1
        elif token[-1] in _CLOSING or token == r"\end":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            signs.append(token)
            start = match.end()
    if not signs:
        return None
    parts.append(text[start:])
    items = tuple(parse_form(part, inside=True) for part in parts)
    return _solved(parts, signs, items) or Form(",".join(signs), items=items)


def _solved(parts: list[str], signs: list[str], items: tuple[Form, ...]) -> Form | None:
    r"""Turn x > 3, 1 < x \le 2 and x \in S, with a single variable, into the set they describe."""
    flip = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
    infinity = Form("scalar", r"\infty"), Form("scalar", r"-\infty")
    if signs == [r"\in"] and is_name(parts[0]):
        return replace(items[1], text=parts[0].strip()) if items[1].items else items[1]
    if len(signs) == 1 and signs[0] in flip:
        if is_name(parts[1]) and not is_name(parts[0]):
            signs, items = [flip[signs[0]]], (items[1], items[0])
        elif not is_name(parts[0]):
            return None
        name, edge = items[0].text, items[1]
        if signs[0] in (">", r"\ge"):
            return Form("()" if signs[0] == ">" else "[)", name, (edge, infinity[0]))
        return Form("()" if signs[0] == "<" else "(]", name, (infinity[1], edge))
    if len(signs) == 2 and is_name(parts[1]):
        if all(sign in (">", r"\ge") for sign in signs):
            signs, items = [flip[sign] for sign in reversed(signs)], tuple(reversed(items))
        if all(sign in ("<", r"\le") for sign in signs):
            brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
            return Form(brackets, items[1].text, (items[0], items[2]))
    return None


def is_name(text: str) -> bool:
    """Whether a text is a single variable, or a function of one such as f(x)."""
    name = r"(?:[A-Za-z]|\\[a-zA-Z]+)'*(?:_(?:\w|\{[^{}]*\}))?'*"
    return re.fullmatch(rf"\s*{name}(?:\({name}\))?\s*", text) is not None


def names_value(form: Form) -> bool:
    """Whether the left side of an equation is a name, such as x, f(2), AB, an area, or (x, y)."""
    if form.items:
        return form.kind != "list" and all(map(names_value, form.items))
    if form.kind != "scalar" or not any(character.isalpha() for character in form.text):
        return False
    if re.fullmatch(r"\\frac\{d[a-zA-Z]\}\{d[a-zA-Z]\}", form.text):
        return True
    return re.search(r"^\d|[-+*/^!]|\\(?:frac|sqrt|cdot|times|binom)", form.text) is None


def _bracketed(text: str) -> Form | None:
    """Parse (a, b), [a, b) and the like; brackets around a single item only group it."""
    braces = text.startswith(r"\{") and text.endswith(r"\}")
    if not braces and not (text[:1] in ("(", "[") and text[-1:] in (")", "]")):
        return None
    if not _is_one_bracket(text):
        return None
    inner = text[2:-2] if braces else text[1:-1]
    parts = _split(_WORD_LIST.sub(",", inner), ",;")
    if braces:
        if re.search(r"(?<!\\)[|:]", inner):  # "such that": set-builder notation
            return Form("scalar", text)
        return _many("list", [part for part in parts if part.strip()])
    if len(parts) == 1:
        return parse_form(inner, inside=True) if (text[0], text[-1]) == ("(", ")") else None
    return _many(text[0] + text[-1], parts)


def _is_one_bracket(text: str) -> bool:
    depth = 0
    tokens = list(re.finditer(r"\\[{}]|[()\[\]{}]", text))
    for number, token in enumerate(tokens):
        depth += 1 if token.group()[-1] in _OPENING else -1
        if depth == 0:
            return number == len(tokens) - 1
    return False


def _scalar(text: str) -> Form:
    unit, base, is_percent = "", "", False
    text = text.removeprefix("+")
    text = _NUMBER_IN_TEXT.sub(r"\1\\text{\2}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    if text.startswith((r"\dollar", r"-\dollar")):
        text, unit = text.replace(r"\dollar", "", 1).strip(), "dollar"
    match = _UNIT.search(text) or _PLAIN_UNIT.search(text)
    if match is not None and match.start() > 0:
        found = match.groupdict()
        rest = text[: match.start()].strip()
        if found.get("percent"):
            text, is_percent = rest, True
        elif found.get("degree"):
            # cos 60 degrees is a number, not an angle; with pi the angle is in radians
            if not _FUNCTION.search(rest) and r"\degree" not in rest and r"\pi" not in rest:
                text, unit = rest, "degree"
        else:
            named = _unit_name(found["name"], found["power"], rest)
            if named is not None:
                text, unit = rest, named
            elif found["name"].strip() in ("percent", "%", r"\%"):
                text, is_percent = rest, True
    match = _BASE.search(text)
    if match is not None:
        named = _BASES.get(match.group(2) or "", match.group(1) or match.group(2) or "")
        if _has_base(text[: match.start()], named):
            base, text = named, text[: match.start()]
    return Form("scalar", text.strip(), unit=unit, base=base, is_percent=is_percent)


def _has_base(digits: str, base: str) -> bool:
    """Whether an index is a base: not in D_4, a_1 and 2a_5, where it belongs to a letter."""
    if re.fullmatch(r"\d+", digits):
        return True
    values = [int(digit, 16) for digit in re.findall(r"[0-9A-F]", digits)]
    is_number = re.fullmatch(r"[0-9A-F]*\d[0-9A-F]*", digits) is not None
    return is_number and base.isdigit() and max(values) < int(base)


_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
          "eight": "8", "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
_SAME_UNITS = {
    "inches": "inch", "in": "inch", "feet": "foot", "ft": "foot", "centimeter": "cm",
    "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "yd": "yard", "mi": "mile", "sec": "second",
    "s": "second", "min": "minute", "hr": "hour", "h": "hour", "lb": "pound", "kilogram": "kg",
    "gram": "g", "liter": "l", "litre": "l", "deg": "degree", "usd": "dollar",
}  # fmt: skip


_ANY_CASE = frozenset(
    ["ft", "in", "min", "hr", "hrs", "sec", "lb", "lbs", "yd", "usd", "kg", "deg", "mph", "sq",
     "cu", "day", "way", "per", "men", "man", "cup", "box", "pen"]
)  # fmt: skip
"""short units that mean the same in every case"""


def _unit_name(name: str, power: str | None, rest: str) -> str | None:
    """Return the canonical spelling of a unit, or None if the words are not a unit."""
    as_written = re.findall(r"[A-Za-z]+", name)
    words = [word.lower() for word in as_written]
    if not words or len(words) > 4 or NOT_UNITS.intersection(words) or re.search(r"\d", name):
        return None
    if any(map(_FRACTION.search, words)):
        return None
    letters = _LETTERS | set("cf") if rest.endswith(r"\degree") else _LETTERS
    if any(len(word) == 1 and word not in letters for word in words) or "M" in as_written:
        return None  # M may stand for million
    words = [_with_case(word) for word in as_written]
    if words[0] in ("square", "sq", "cubic", "cu"):
        power = "2" if words[0].startswith("sq") else "3"
        words = words[1:] or ["unit"]
    singular = [_SAME_UNITS.get(word, word) for word in words]
    singular = [w[:-1] if w.endswith("s") and len(w) > 2 else w for w in singular]
    singular = [_SAME_UNITS.get(word, word) for word in singular]
    return " ".join(singular) + (f"^{power}" if power else "")


def _with_case(word: str) -> str:
    """Return a word in lower case, unless it is an abbreviation such as mW, which is not MW."""
    lower = word.lower()
    if word == "L":
        return "l"
    is_word = lower in _ANY_CASE or (len(word) > 3 and word[1:] == lower[1:])
    return lower if is_word or (len(word) > 3 and word.isupper()) else word


def normalized_words(text: str) -> str | None:
    """Return an answer in words in a canonical spelling, or None if it is a formula."""
    stripped, count = _TEXT.subn(r"\1", text)
    plain = re.sub(r"\s+", " ", stripped).strip(' ."*')
    plain = re.sub(r"^\((.*)\)$", r"\1", plain).strip()
    if len(plain) == 1 and plain.isalpha():
        return plain
    if re.fullmatch(r"[^\W\d_]+\.?(?:[ .'-]+[^\W\d_]{2,})*", plain) is None:
        return None
    if count or len(plain) > 2 or plain == "no" or not plain.isascii() or plain != plain.lower():
        return plain.casefold()
    return None


def _unwrapped(text: str) -> str:
    """Remove spaces and braces around the whole."""
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and _is_one_bracket(text):
        text = text[1:-1].strip()
    return text


def _split(text: str, separators: str) -> list[str]:
    """Split at separators outside all brackets."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if text.startswith(("\\begin", "\\end"), position):
            depth += 1 if text.startswith("\\begin", position) else -1
            position += 4
        elif character == "\\" and text[position + 1 : position + 2] not in ("{", "}"):
            position += 1
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character in separators and depth <= 0:
            parts.append(text[start:position])
            start = position + 1
        position += 1
    return [*parts, text[start:]]


def _split_command(text: str, command: str) -> list[str]:
    """Split at a command outside all brackets."""
    marked = re.sub(re.escape(command) + r"(?![a-zA-Z])", "\x00", text)
    return _split(marked, "\x00")
