"""From what somebody has before them (a code, an error text, a whole log line, a status) to the entries that explain it.

The texts known are those that the entries list and those that the source prints (`sites.py`), so that a message whose
words were changed yesterday is still found today.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tectum.catalogue.loader import Entry, entries
from tectum.catalogue.sites import raised_at
from tectum.errors import CODES

#: characters of the text that are looked at
MAX_TEXT = 20_000
#: entries that a vague question gets at most
MAX_GUESSES = 5
#: letters of a message that have to be there before its beginning alone is taken for it
_ENOUGH = 15
#: most characters that stand for one placeholder
_LONGEST_VALUE = 256

_PLACEHOLDER = re.compile(r"<[^<>]*>")
_CODE = re.compile(r"(?<![\w])(?:" + "|".join(sorted(CODES, key=len, reverse=True)) + r")(?![\w])")
#: what stands before or around a code when it is meant as one: `code=x`, `"code": "x"`, `[x]`, `/errors/x`
_MARKED = re.compile(r"(?:code\W{1,4}|\[|/errors/)(?P<code>[a-z_]+)\b")
_WORD = re.compile(r"[a-z0-9_]{3,}")
#: a code of several words as people and other programs write it: "CUDA out of memory"
_TITLE = re.compile(
    r"\b(?:"
    + "|".join(sorted((code.replace("_", " ") for code in CODES if "_" in code), key=len, reverse=True))
    + r")\b"
)

# how sure a find is; the letters of a message that matched (at most 200) lie between
_IS_MARKED, _IS_NAMED, _IS_A_WORD = 1000, 400, 5


def find(text: str) -> tuple[Entry, ...]:
    """The entries that `text` is about, best first; none when nothing fits.

    A code that is marked as one goes before a message that matches, and that before a code which is only mentioned. With
    none of these, `text` may be an HTTP or gRPC status, and then a few words to look for.
    """
    text = " ".join(text[:MAX_TEXT].split())
    scores = _by_code(text)
    for pattern in _patterns():
        scores[pattern.code] = max(scores.get(pattern.code, 0), pattern.score(text))
    scores = {code: score for code, score in scores.items() if score > 0}
    best = max(scores.values(), default=0)
    if best <= _IS_A_WORD:
        scores = scores or _by_status(text) or _by_words(text)
    order = sorted(scores, key=lambda code: -scores[code])  # stable: equals stay in the order of CODES
    known = {entry.code: entry for entry in entries()}
    return tuple(known[code] for code in order)


def _by_code(text: str) -> dict[str, float]:
    scores: dict[str, float] = dict.fromkeys(CODES, 0)
    for code in _CODE.findall(text):
        scores[code] = _IS_NAMED if "_" in code else _IS_A_WORD  # "internal" is a word of many sentences
    for match in _MARKED.finditer(text):
        if match["code"] in scores:
            scores[match["code"]] = _IS_MARKED
    for title in _TITLE.findall(text.lower()):
        code = title.replace(" ", "_")
        scores[code] = scores[code] or _IS_A_WORD
    if text in CODES:
        scores[text] = _IS_MARKED
    return scores


def _by_status(text: str) -> dict[str, float]:
    """The codes of an HTTP status (`413`) or of a gRPC status (`RESOURCE_EXHAUSTED`)."""
    return {code: 1.0 for code, spec in CODES.items() if text in (str(spec.status), spec.grpc)}


def _by_words(text: str) -> dict[str, float]:
    """The entries that share most of the words asked for; a word that few entries use counts more."""
    asked = set(_WORD.findall(text.lower()))
    words = _words()
    found: dict[str, float] = {}
    for word in asked:
        holders = [code for code, held in words.items() if word in held]
        for code in holders:
            found[code] = found.get(code, 0) + 1 / len(holders)
    best = sorted(found, key=lambda code: -found[code])[:MAX_GUESSES]
    return {code: found[code] for code in CODES if code in best}


@cache
def _words() -> dict[str, frozenset[str]]:
    def prose(entry: Entry) -> str:
        code_words = entry.code.replace("_", " ")
        return " ".join([code_words, entry.message, entry.meaning, entry.when, *entry.situations, *entry.todo])

    return {entry.code: frozenset(_WORD.findall(prose(entry).lower())) for entry in entries()}


# --- messages ---


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One message: its fixed pieces, in order, with anything between them."""

    code: str
    pieces: tuple[str, ...]
    whole: re.Pattern[str]

    def score(self, text: str) -> float:
        """Letters of the message that are in `text`: all of them, or those of its beginning, or 0."""
        if self.whole.search(text):
            return float(sum(map(len, self.pieces)))
        return self._beginning(text.lower())

    def _beginning(self, text: str) -> float:
        """Texts are cut at 200 characters, and people paste the first half: the first pieces may be enough."""
        start, letters = 0, 0
        for piece in self.pieces:
            place = text.find(piece.lower(), start, None if start == 0 else start + _LONGEST_VALUE + len(piece))
            if place < 0:
                break
            start, letters = place + len(piece), letters + len(piece)
        return letters / 2 if letters >= _ENOUGH else 0.0


@cache
def _patterns() -> tuple[_Pattern, ...]:
    patterns = (_pattern(entry.code, message) for entry in entries() for message in known_messages(entry))
    return tuple(pattern for pattern in patterns if pattern is not None)


def known_messages(entry: Entry) -> Iterator[str]:
    """Every text that is known to be printed under an entry's code, those of the entry itself first."""
    yield entry.message
    yield from entry.messages
    own = {skeleton(message) for message in (entry.message, *entry.messages)}
    for site in raised_at(entry.code):
        if site.message is not None and skeleton(site.message) not in own:
            own.add(skeleton(site.message))
            yield site.message


def skeleton(message: str) -> str:
    """A message with its placeholders made equal, so that `Port <port>` and `Port <number>` are the same text."""
    return _PLACEHOLDER.sub("<>", " ".join(message.split()))


def is_case_of(message: str, general: str) -> bool:
    """Whether `general` prints `message`, with values for some of its placeholders."""
    pattern = ".+".join(map(re.escape, _PLACEHOLDER.split(general)))
    return re.fullmatch(pattern, message) is not None


def _pattern(code: str, message: str) -> _Pattern | None:
    """None for a message that is hardly more than its values: it would match everything."""
    pieces = tuple(piece for piece in _PLACEHOLDER.split(" ".join(message.split())) if piece.strip())
    if sum(1 for piece in pieces for char in piece if char.isalpha()) < _ENOUGH // 2:
        return None
    between = f".{{0,{_LONGEST_VALUE}}}?"
    return _Pattern(code, pieces, re.compile(between.join(map(re.escape, pieces)), re.IGNORECASE))
