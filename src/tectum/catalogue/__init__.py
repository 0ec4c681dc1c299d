"""The error catalogue: what each code of `tectum.errors.CODES` means to a person.

Owns the entries (`entries/<code>.toml`, data that anyone can read and correct; `loader.py`), how they are found
(`search.py`), where each code is raised (`sites.py`, worked out from the installed source) and how they are shown
(`render.py`). What a code means to a machine stays in `tectum.errors`: this package imports nothing else of the house,
and nothing outside the base install.
"""

from tectum.catalogue.loader import Entry, entries, entry
from tectum.catalogue.render import (
    CONTENT_SECURITY_POLICY,
    index_html,
    index_markdown,
    to_html,
    to_json,
    to_markdown,
    to_text,
)
from tectum.catalogue.search import find
from tectum.catalogue.sites import Site, raised_at

__all__ = [
    "CONTENT_SECURITY_POLICY",
    "Entry",
    "Site",
    "entries",
    "entry",
    "find",
    "index_html",
    "index_markdown",
    "raised_at",
    "to_html",
    "to_json",
    "to_markdown",
    "to_text",
]
