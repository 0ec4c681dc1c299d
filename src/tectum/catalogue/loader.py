"""One entry a code, read from `entries/<code>.toml` when it is first asked for."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tectum.errors import CODES, BadRequestError, CodeSpec, StartupError, error_class


@dataclass(frozen=True, slots=True)
class Entry:
    """One code, explained.

    message: the text as it is printed, placeholders as `<name>`; messages: other texts printed under the same code.
    meaning: what is the case, in a sentence or two. when: at which point it is noticed, and who is told.
    situations: how people come to meet it, most frequent first. todo: steps, in order.
    example: Python of a client that handles it. related: codes that are confused with it or come along with it.
    """

    code: str
    message: str
    meaning: str
    when: str
    situations: tuple[str, ...]
    todo: tuple[str, ...]
    example: str
    related: tuple[str, ...]
    messages: tuple[str, ...] = ()

    @property
    def spec(self) -> CodeSpec:
        """Status, gRPC status and whether a retry makes sense."""
        return CODES[self.code]

    @property
    def exception(self) -> str:
        """Name of the class it is raised as, in `tectum.errors`."""
        return error_class(self.code).__name__

    @property
    def stops_the_command(self) -> bool:
        """Whether it ends the command line with exit code 2, instead of answering a request."""
        return issubclass(error_class(self.code), StartupError)


def entry(code: str) -> Entry:
    """The entry of `code`. Raises BadRequestError `not_found` when there is no such code."""
    if code not in CODES:
        raise BadRequestError("not_found", f"There is no error code {code[:40]!r}; /errors lists those there are")
    return _read(code)


def entries() -> tuple[Entry, ...]:
    """All entries, in the order of `CODES`: request, media, life, service, start-up."""
    return tuple(_read(code) for code in CODES)


@cache
def _read(code: str) -> Entry:
    """One data file. A missing or unknown key is a defect of that file and raises TypeError."""
    text = files("tectum.catalogue").joinpath("entries", f"{code}.toml").read_text("utf-8")
    fields: dict[str, Any] = {"code": code}
    for name, value in tomllib.loads(text).items():
        fields[name] = tuple(value) if isinstance(value, list) else value.strip()
    return Entry(**fields)
