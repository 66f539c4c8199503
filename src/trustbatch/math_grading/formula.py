r"""Parsing a formula: from normalized LaTeX to a tree that can be evaluated.

Ambiguous input is refused and then compared as text only: two adjacent numbers, a product after a
slash such as 1/2x, an unknown command.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 2000
MAX_DEPTH = 40
FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
     "ln", "log", "lg", "exp"]
)  # fmt: skip
OF_SEVERAL = frozenset(["gcd", "lcm", "max", "min"])
"""functions of several numbers, in brackets"""
GREEK = frozenset(
    ["alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
     "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi",
     "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega", "ell",
     "aleph"]
)  # fmt: skip
FUNCTION_LETTERS = frozenset(["f", "g", "F", "G", r"\zeta", r"\Gamma", r"\varphi", r"\Phi"])
"""letters that, in front of a bracket, always denote a function"""
_TOKEN = re.compile(
    r"(?P<number>\d*\.\d*\\overline\{\d+\}|\d*\.\d+|\d+\.?)"
    r"|(?P<command>\\[a-zA-Z]+|\\[{}|%])"
    r"|(?P<other>[A-Za-z]|[-+*/^_!|'(){}\[\],=<>])"
    r"|(?P<space>\s+)"
)
_DERIVATIVE = re.compile(
    r"\\frac ?(?:\{\(?d(?:[^{}]|\{[^{}]*\})*\}|d) ?\{\(?d ?(?:[a-zA-Z]|\\[a-z])"
    r"|(?<![a-zA-Z])d[^/]{0,40}/ ?[({]*d ?(?:[a-zA-Z]|\\[a-z])"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_CLOSES = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}


class ParseError(ValueError):
    """The text is not a formula, or an ambiguous one."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a formula.

    `kind` is number, symbol, constant, value (of an unknown function), or the name of the
    operation on `parts`.
    """

    kind: str
    parts: tuple["Node", ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)

    def symbols(self) -> set[str]:
        """Return the names of all variables and of functions such as f in f(0)."""
        names = {self.name} if self.kind == "symbol" else set()
        if self.kind == "value":
            names = {f"{self.name}()"}
        return names.union(*(part.symbols() for part in self.parts))


def parse_formula(text: str) -> Node:
    """Return the tree of a normalized formula, or raise ParseError."""
    if len(text) > MAX_LENGTH:
        raise ParseError("too long")
    if _DERIVATIVE.search(text):
        raise ParseError("d may be the sign of a derivative")
    parser = _Parser(_tokens(text))
    tree = parser.sum(0)
    if parser.current is not None:
        raise ParseError(f"unexpected {parser.current!r}")
    return tree


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ParseError(f"unknown character {text[position]!r}")
        position = match.end()
        if match.lastgroup == "space":
            continue
        tokens.append(match.group())
        if match.group() in (r"\frac", r"\sqrt", r"\binom"):
            position = _split_digits(text, position, tokens)
    return tokens


def _split_digits(text: str, position: int, tokens: list[str]) -> int:
    r"""Take the arguments of \frac12 digit by digit, as TeX does."""
    for _ in range(1 if tokens[-1] == r"\sqrt" else 2):
        match = re.compile(r"\s*(\d)").match(text, position)
        if match is None:
            break
        tokens.append(match.group(1))
        position = match.end()
    return position


class _Parser:
    """Recursive descent: each method parses one level of precedence and tracks the depth."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.open_bars = 0
        self.groups: dict[int, tuple[Node, int]] = {}

    @property
    def current(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str:
        token = self.current
        if token is None:
            raise ParseError("it ends too early")
        self.position += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise ParseError(f"{token!r} is missing")

    def sum(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ParseError("nested too deep")
        # flat rather than nested: recursion over a long sum must not go too deep
        terms = [self.signed(depth)]
        while self.current in ("+", "-"):
            terms.append(self.signed(depth))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed(self, depth: int) -> Node:
        sign = self.take() if self.current in ("+", "-") else "+"
        term = self.product(depth)
        return term if sign == "+" else Node("negate", (term,))

    def product(self, depth: int) -> Node:
        factors = self.juxtaposed(depth)
        while self.current in ("*", "/", r"\cdot", r"\times", r"\div"):
            divides = self.take() in ("/", r"\div")
            if self.current == "-":
                self.take()
                factors.append(Node("number", value=Fraction(-1)))
            more = self.juxtaposed(depth)
            if divides and len(more) > 1:
                raise ParseError("a product after a slash is ambiguous")
            factors += [Node("reciprocal", (more[0],))] if divides else more
        return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))

    def juxtaposed(self, depth: int) -> list[Node]:
        """Parse factors without an operator between them, such as 2xy."""
        mixed = self.mixed_number(depth)
        factors = [self.power(depth) if mixed is None else mixed]
        while self.starts_factor():
            self.refuse_number(factors[-1])
            factors.append(self.power(depth))
        return factors

    def refuse_number(self, before: Node) -> None:
        """Refuse 2 3 and x2, which are ambiguous; n 2^n and 9! 8! are not."""
        if self.current is None or self.current[0] not in "0123456789.":
            return
        after = self.tokens[self.position + 1 : self.position + 2]
        if before.kind == "number" or after not in (["^"], ["!"]):
            raise ParseError("a number after another factor")

    def starts_factor(self) -> bool:
        token = self.current
        if token is None or token in (
            "+", "-", "*", "/", "^", "_", "!", "'", ")", "]", "}", r"\}", ",", "=", "<", ">",
            r"\cdot", r"\times", r"\div", r"\%", r"\rfloor", r"\rceil",
        ):  # fmt: skip
            return False
        return token != "|" or not self.open_bars

    def mixed_number(self, depth: int) -> Node | None:
        r"""Parse 1\frac{4}{5} as nine fifths; an improper fraction after a number is refused."""
        start = self.position
        whole = self.current
        if whole is None or not whole.isdigit() or self.tokens[start + 1 : start + 2] != [r"\frac"]:
            return None
        self.position += 2
        parts = [self.argument(depth) for _ in range(2)]
        if any(part.kind != "number" or part.value.denominator != 1 for part in parts):
            self.position = start
            return None
        above, below = parts[0].value, parts[1].value
        if not 0 <= above < below:
            raise ParseError("a number before an improper fraction")
        return Node("number", value=_number(whole) + above / below)

    def power(self, depth: int) -> Node:
        base = self.postfix(depth)
        if self.current == "^":
            self.take()
            symbol = base
            base = Node("power", (symbol, self.exponent(depth)))
            if self.current == "^":
                raise ParseError("a double superscript")
            if symbol.kind == "symbol" and self.starts_argument(symbol, depth):
                raise ParseError("a power of a function, or its inverse")
            base = self.factorials(base)
        return base

    def exponent(self, depth: int) -> Node:
        if self.current in ("+", "-"):
            sign = self.take()
            part = self.argument(depth)
            return part if sign == "+" else Node("negate", (part,))
        return self.argument(depth)

    def postfix(self, depth: int) -> Node:
        token = self.current or ""
        node = self.atom(depth)
        # in brackets, too, f is a function: (f)(0) is not a product, but (a)(2) is one
        if node.kind == "symbol" and (token not in ("(", "[", "{") or _is_function(node)):
            node = self.function_value(node, depth)
        return self.factorials(node)

    def function_value(self, symbol: Node, depth: int) -> Node:
        """Parse f(x + 1), P(3) and a(b) as values of a function, but a(b + 1) as a product."""
        if not self.starts_argument(symbol, depth):
            return symbol
        return Node("value", (self.group(depth),), name=symbol.name)

    def starts_argument(self, symbol: Node, depth: int) -> bool:
        """Whether a bracket follows that contains the argument of a function, not a factor."""
        if self.current not in ("(", "[", "{"):
            return False
        if _is_function(symbol):
            return True
        start = self.position
        inner = self.group(depth)
        self.position = start
        plain = inner.parts[0] if inner.kind == "negate" else inner
        return plain.kind in ("number", "symbol", "constant")

    def factorials(self, node: Node) -> Node:
        if self.current == "!":
            self.take()
            node = Node("factorial", (node,))
        if self.current == r"\degree":
            self.take()
            node = Node("degrees", (node,))
        return node

    def argument(self, depth: int) -> Node:
        """Parse the argument of a command or superscript: a group, or one atom."""
        if self.current == "{":
            return self.group(depth)
        return self.atom(depth)

    def group(self, depth: int) -> Node:
        start = self.position
        if start in self.groups:  # each group is parsed once, though it may be looked at twice
            inner, self.position = self.groups[start]
            return inner
        closing = _CLOSES[self.take()]
        bars, self.open_bars = self.open_bars, 0
        inner = self.sum(depth + 1)
        self.open_bars = bars
        self.expect(closing)
        self.groups[start] = inner, self.position
        return inner

    def atom(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ParseError("nested too deep")
        token = self.take()
        if token[0] in "0123456789.":
            return Node("number", value=_number(token))
        if token in ("(", "[", "{"):
            self.position -= 1
            return self.group(depth)
        if token == "|":
            self.open_bars += 1
            inner = self.sum(depth + 1)
            self.open_bars -= 1
            self.expect("|")
            return Node("absolute", (inner,))
        if token.isalpha():
            return self.letter(token)
        if token.startswith("\\"):
            return self.command(token[1:], depth)
        raise ParseError(f"unexpected {token!r}")

    def letter(self, letter: str) -> Node:
        name = letter + self.suffix()
        if name in ("e", "i"):
            return Node("constant", name=name)
        return Node("symbol", name=name)

    def suffix(self) -> str:
        """Parse subscripts and primes, which are part of a variable's name."""
        suffix = ""
        while self.current in ("_", "'"):
            token = self.take()
            suffix += token
            if token == "_":
                suffix += self.raw_argument()
        return suffix

    def raw_argument(self) -> str:
        token = self.take()
        if token != "{":
            return token
        depth, inner = 1, []
        while depth:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            inner.append(token)
        return "".join(inner[:-1])

    def command(self, name: str, depth: int) -> Node:
        if name == "pi":
            return Node("constant", name="pi")
        if name in GREEK:
            return Node("symbol", name=f"\\{name}{self.suffix()}")
        if name in ("frac", "binom"):
            above, below = self.argument(depth + 1), self.argument(depth + 1)
            if name == "binom":
                return Node("binomial", (above, below))
            return Node("multiply", (above, Node("reciprocal", (below,))))
        if name == "sqrt":
            degree = Node("number", value=Fraction(2))
            if self.current == "[":
                degree = self.group(depth + 1)
            return Node("root", (degree, self.argument(depth + 1)))
        if name in FUNCTIONS:
            return self.function(name, depth + 1)
        if name in OF_SEVERAL:
            return self.of_several(name, depth)
        if name in ("lfloor", "lceil"):
            inner = self.sum(depth + 1)
            self.expect("\\r" + name[1:])
            return Node("floor" if name == "lfloor" else "ceiling", (inner,))
        raise ParseError(f"unknown command \\{name}")

    def of_several(self, name: str, depth: int) -> Node:
        """Parse gcd(12, 18) and the like of numbers."""
        closing = {"(": ")", r"\{": r"\}"}.get(self.take())
        if closing is None:
            raise ParseError(f"{name} without brackets")
        parts = [self.sum(depth + 1)]
        while self.current == ",":
            self.take()
            parts.append(self.sum(depth + 1))
        self.expect(closing)
        if any(part.symbols() for part in parts):
            raise ParseError(f"{name} of variables")
        return Node("of several", tuple(parts), name=name)

    def function(self, name: str, depth: int) -> Node:
        parts: tuple[Node, ...] = ()
        if name == "log" and self.current == "_":
            self.take()
            parts = (self.argument(depth),)
        exponent = None
        if self.current == "^":
            self.take()
            exponent = self.exponent(depth)
            if exponent.kind == "negate":
                raise ParseError("an inverse or a reciprocal")
        is_bracketed = self.current in ("(", "[", "{")
        inner = self.group(depth) if is_bracketed else self.function_argument(depth)
        call = Node("call", (inner, *parts), name=name)
        return call if exponent is None else Node("power", (call, exponent))

    def function_argument(self, depth: int) -> Node:
        """Parse factors up to the next function: sin 2x cos y is sin(2x) cos(y)."""
        factors = [self.power(depth)]
        while self.starts_factor() and self.current not in [f"\\{name}" for name in FUNCTIONS]:
            if self.current in ("(", "[", "|"):
                raise ParseError("where the argument of a function ends is not clear")
            self.refuse_number(factors[-1])
            factors.append(self.power(depth))
        if any(factor.kind == "value" for factor in factors):
            raise ParseError("where the argument of a function ends is not clear")
        return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))


def _is_function(symbol: Node) -> bool:
    return re.sub(r"[_'].*", "", symbol.name) in FUNCTION_LETTERS


def _number(token: str) -> Fraction:
    repeating = _REPEATING.fullmatch(token)
    if repeating is None:
        return Fraction(token.rstrip(".") or "0")
    whole, fixed, cycle = repeating.groups()
    scale = 10 ** len(fixed)
    start = Fraction(int((whole + fixed) or "0"), scale)
    return start + Fraction(int(cycle), scale * (10 ** len(cycle) - 1))
