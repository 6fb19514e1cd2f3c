r"""Spellings of formulas that math-verify 0.9 misreads, written as it reads them; answers in words.

Each entry of `_SPELLINGS` mends one kind of misreading: `**73**` is read as `73**`, `1\,234` as
235, `2.5e-3` as Euler's number times 2.5 less 3, `2i` as a variable, `\mathrm{e}` as another one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

_Change = str | Callable[[re.Match[str]], str]


def _repeating(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction."""
    whole, fixed, period = match.groups()
    nines = 10 ** len(fixed) * (10 ** len(period) - 1)
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _rewritten(match: re.Match[str]) -> str:
    """Degrees of an angle in a function, as those have radians."""
    return rf"{match[1]}\frac{{{match[2]}\pi}}{{180}}"


def _cardinal(match: re.Match[str]) -> str:
    """`12th` as a number, which would be a product with `t` and `h`."""
    return match[1][:-2]


def _ascii(match: re.Match[str]) -> str:
    """Digits and signs of other forms, as full-width ones and those of exponents."""
    return unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")


_PARTS = {"½": "1}{2", "⅓": "1}{3", "⅔": "2}{3", "¼": "1}{4", "¾": "3}{4"}
# No pattern has two ways to read the same text, or looks further than a bounded distance.
_SPELLINGS: tuple[tuple[re.Pattern[str], _Change], ...] = (
    # Emphasis of Markdown, which a power (`2**3`) is not.
    (re.compile(r"(?<![\w*)}])(\*{1,3}|__|`)(?=\S)((?:(?!\1)[^\n]){1,200})\1(?![\w*(])"), r"\2"),
    (re.compile(r"\\fbox(?![a-zA-Z])"), r"\\boxed"),
    (re.compile(r"[\uff10-\uff19]"), _ascii),
    (re.compile(r"[⁺⁻]?[⁰¹²³⁴-⁹]{1,40}"), lambda m: f"^{{{_ascii(m)}}}"),
    (re.compile(r"((?:^|[{$=(,])\s{0,9})\u2013(?=\s?[\d.\\])"), r"\1-"),
    (re.compile(r"((?:^|[{$=])\s{0,9})(?:\\approx|\\simeq|\\sim|≈)(?![a-zA-Z])"), r"\1"),
    (re.compile(r"(?<=[\w)}])\s?·\s?(?=[\w(\\])"), r"\\cdot "),
    (re.compile(r"(?<=\d)\\text\{,\}(?=\d{3})"), ""),
    (
        re.compile(r"\\operatorname\*?\{(arc(?:sin|cos|tan)|sin|cos|tan|ln|log|exp|gcd|max|min)\}"),
        r"\\\1",
    ),
    (re.compile(r"\\lg(?![a-zA-Z])"), r"\\log"),
    (
        re.compile(r"((?:^|[{$])\s{0,9}\d{0,9}(?:1st|2nd|3rd|\dth))(?=\s{0,9}(?:\}|\$|$))"),
        _cardinal,
    ),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\varnothing(?![a-zA-Z])|∅|^\s{0,9}\\\{\s{0,9}\\\}\s{0,9}$"), r"\\emptyset "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"√\s?\(([^()]{1,80})\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s?(\d{1,40}|[a-z])"), r"\\sqrt{\1}"),
    (re.compile(r"[½⅓⅔¼¾]"), lambda m: rf"\frac{{{_PARTS[m[0]]}}}"),
    (re.compile(r"(?:\^\\degree|\\degree|\^?°)(?![a-zA-Z])"), r"^\\circ "),
    (
        re.compile(
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?[23]\}?)?\s{0,9}(?:\\left)?[({]?\s{0,9})"
            r"(\d{1,9}(?:\.\d{1,9})?)\s?\^\s?(?:\\circ|\{\s?\\circ\s?\})"
        ),
        _rewritten,
    ),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"\\(?:text|mathrm)\{(?:([ei])|(infinity))\}"), lambda m: m[1] or r"\infty "),
    (re.compile(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))"), ""),  # of thousands
    (  # thousands with blanks, which are sums or products otherwise
        re.compile(
            r"((?:^|[{$=])\s{0,9}[+-]?\d{1,3})((?:[ \u00a0\u2009\u202f]\d{3}){1,9})"
            r"(?=\s{0,9}(?:\}|\$|$|\.\d))"
        ),
        lambda m: m[1] + re.sub(r"\D", "", m[2]),
    ),
    (  # a mixed number
        re.compile(r"((?:^|[{$=])\s{0,9}[+-]?\d{1,9})[ ](\d{1,9})/(\d{1,9})(?=\s{0,9}(?:\}|\$|$))"),
        r"\1\\frac{\2}{\3}",
    ),
    (re.compile(r"(?<!\\)\\[,;: ]"), " "),
    (re.compile(r"(?:[€£¥₹]|\\\$)(?=\s?\d)"), ""),
    (
        # `2e-3` stays the difference: only a point, a 1 or a bare exponent make it one number.
        re.compile(
            r"(?<![\w.\\])(\d{1,400}\.\d{1,400}|1(?=[eE])|\d{1,400}(?=[eE]\d))"
            r"[eE]([+-]?\d{1,4})(?!\w|\.\w)"
        ),
        lambda m: f"{m[1]}*10^({int(m[2])})",
    ),
    (re.compile(r"(?<=\d)i(?![a-zA-Z])"), " i"),
    (re.compile(r"(\d{1,40})\.(\d{0,40})\\overline\{(\d{1,40})\}"), _repeating),
    (re.compile(r"(?<=[\w)}])\.(?=\s{0,9}(?:\}|$))"), ""),  # the end of a sentence
)
# Behind a number alone: elsewhere, and with other letters, they are products of variables.
_SHORT_UNIT = re.compile(
    r"((?:^|[{$])\s{0,9}[+-]?\d[\d.,]{0,40}(?:/\d{1,9})?)[ ]"
    r"(?:[cdkmn]m|[km]?g|m?[lL]|m|s|in|ft|yd|mi|mph|kph|lbs?|oz|gal|pt|qt|min|sec|hrs?|days?|year|"
    r"week|hour|feet|foot|inch|mile|yard|gram|cent|rpm|deg|rad)(?:/(?:s|h|min|hr|sec))?"
    r"(?:\^?[23]|\^\{[23]\})?(?=\s{0,9}(?:\}|\$|$))"
)
_UNIT = re.compile(
    r"(?<=[\d}])\s{0,9}\\(?:text|mathrm|mbox)\{\s{0,9}(?!percent|pct)[^{}\d]{0,60}\}"
    r"(?:\^(?:\d|\{\d\}))?(?=\s{0,9}(?:\}|\$|$))"
    r"|(?<=\d)[ ](?!percent|pct)[a-z]{5,20}(?=\s{0,9}(?:\}|\$|$))"
)
# `16/3 \\pi` has the fraction as a factor; without the blank either reading is common.
_FACTOR = re.compile(
    r"(?<![\w.^/)}])(?<!\d )(\d{1,40})/(\d{1,40})[ ](?=\\(?:pi|sqrt)|[a-zA-Z](?![a-zA-Z]))"
)
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)(?![a-zA-Z])")
_COMMANDS = re.compile(r"\\(?:begin|end|mathbb|mathcal|operatorname\*?)\{[^{}]{0,40}\}|\\[a-zA-Z]+")
_FUNCTIONS = "and|or|sqrt|sinh?|cosh?|tanh?|cot|sec|csc|log|exp|min|max|mod|lim|inf|infinity"
_WORD = re.compile(rf"(?i)(?<![a-z])(?!(?:{_FUNCTIONS})(?![a-z]))[a-z]{{4,40}}(?![a-z])")
# Short ones may be products, as `xy` and `abc`, but not if they have one of `eiou`, as `no`.
_SHORT_WORD = re.compile(r"(?i)\W*(?=[a-z]{0,2}[eiou])[a-z]{2,3}\W*")
_AS_TEXT = re.compile(
    r"\\(?:ldots|cdots|dots)(?![a-zA-Z])|\.\.\.|…|^\s*\w{1,80}_\{?\d{1,3}\}?\s*$|\d:\d"
    r"|^\s*0[xXbBoO][0-9a-fA-F]{1,80}\s*$|\d\s(?:of|to|by|in|on|at|vs)\s\d"
)
MISSING = frozenset({"nan", "n/a", "#n/a", "<na>"})
"""How tables write that there is no value."""


def spelled(text: str) -> str:
    """A response or an answer as math-verify reads it, without units in words."""
    for pattern, change in _SPELLINGS:
        text = pattern.sub(change, text)
    return _FACTOR.sub(r"\\frac{\1}{\2} ", _SHORT_UNIT.sub(r"\1", _UNIT.sub("", text)))


def in_words(answer: str) -> bool:
    r"""Whether an answer is compared as a text: `even`, `1, 2, \ldots, n`, `1101_2`, `12:00`.

    As a formula, a word is a product of letters, an ellipsis nothing, a base left out.
    """
    bare = _COMMANDS.sub(" ", _WRAPPERS.sub("", answer))
    return any((_AS_TEXT.search(answer), _WORD.search(bare), _SHORT_WORD.fullmatch(bare)))


def plain(answer: str) -> str:
    """The same text for answers that say the same: without case, blanks, marks and braces."""
    bare = re.sub(r"\\(?:cdots|dots)(?![a-zA-Z])|\.\.\.|…", r"\\ldots", _WRAPPERS.sub("", answer))
    bare = re.sub(r"[\s{}$]", "", bare).rstrip(".").casefold()
    return re.sub(r"^\((\w+)\)$", r"\1", bare)
