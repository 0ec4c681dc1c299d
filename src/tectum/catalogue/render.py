"""How an entry is shown: JSON for programs, a page for browsers, text for terminals, Markdown for the docs.

Pure: an entry in, text out. Pages are self-contained (one style block, no scripts, nothing from other hosts) and
everything in them is escaped. What changes with every edit of the source, line numbers and excerpts, is shown
by JSON, page and terminal, but not in the committed docs.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable
from html import escape
from http import HTTPStatus
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from tectum.catalogue.loader import Entry, entries
from tectum.catalogue.search import is_case_of, known_messages
from tectum.catalogue.sites import Site, raised_at

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --soft: #5b616b; --page: #fff; --box: #f4f5f7; --line: #d9dce1;
  --link: #0b57d0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --soft: #9aa1ac; --page: #15171a; --box: #1f2226;
  --line: #363b42; --link: #8ab4f8; --bad: #f2b8b5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 46rem; color: var(--ink); background: var(--page);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0.4rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 0.4rem; }
a { color: var(--link); }
nav, .soft { color: var(--soft); font-size: 0.9rem; }
code, pre { font: 0.875rem/1.5 ui-monospace, monospace; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: 0.7rem 0.9rem;
  overflow-x: auto; margin: 0.4rem 0; }
pre.message { border-left: 3px solid var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: none; color: var(--bad); font-weight: 600; }
li { margin: 0.25rem 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.8rem 0.35rem 0; border-bottom: 1px solid var(--line); }
"""

#: for the header of that name, wherever a page is served: only its own style applies, nothing is loaded or run
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _facts(entry: Entry) -> dict[str, str]:
    """What a program needs to know of the code, in words."""
    facts = {
        "HTTP status": f"{entry.spec.status} {HTTPStatus(entry.spec.status).phrase}",
        "gRPC status": entry.spec.grpc,
        "Retry": "yes, after `retry_after` seconds where given"
        if entry.spec.retryable
        else "no: change something first",
        "Python": f"tectum.errors.{entry.exception}",
    }
    return {**facts, "Command line": "exit code 2"} if entry.stops_the_command else facts


def _further_messages(entry: Entry) -> list[str]:
    """Texts beside the main one: those of the entry, then those of the source that none of them is a case of."""
    own = [entry.message, *entry.messages]
    printed = [text for text in known_messages(entry) if not any(is_case_of(mine, text) for mine in own)]
    return [*entry.messages, *printed]


def _excerpt(site: Site) -> list[tuple[int, str]]:
    """Number and text of each line around a site, without the indentation that all of them share."""
    return list(enumerate(dedent("\n".join(site.source)).split("\n"), start=site.first_line))


# --- JSON ---


def to_json(entry: Entry) -> dict[str, Any]:
    """For `GET /api/errors/{code}`: everything, with the places that raise it and their source."""
    return {
        "code": entry.code,
        "status": entry.spec.status,
        "grpc": entry.spec.grpc,
        "retryable": entry.spec.retryable,
        "exception": entry.exception,
        "message": entry.message,
        "messages": _further_messages(entry),
        "meaning": entry.meaning,
        "when": entry.when,
        "situations": list(entry.situations),
        "todo": list(entry.todo),
        "example": entry.example,
        "related": list(entry.related),
        "raised_at": [_site_json(site) for site in raised_at(entry.code)],
        "page": f"/errors/{entry.code}",
    }


def _site_json(site: Site) -> dict[str, Any]:
    return {
        "file": site.file,
        "line": site.line,
        "function": site.function,
        "message": site.message,
        "first_line": site.first_line,
        "source": list(site.source),
    }


# --- HTML ---


def to_html(entry: Entry) -> str:
    """The page `/errors/{code}`. Serve it with `CONTENT_SECURITY_POLICY`."""
    facts = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in _facts(entry).items())
    further = "".join(f"<li><code>{escape(message)}</code></li>" for message in _further_messages(entry))
    parts = [
        f'<nav><a href="/errors">All errors</a> · <a href="/api/errors/{entry.code}">JSON</a></nav>',
        f"<h1>{escape(entry.code)}</h1>",
        f'<pre class="message">{escape(entry.message)}</pre>',
        f"<p>{_prose(entry.meaning)}</p>",
        f"<h2>What to do</h2>{_list('ol', entry.todo)}",
        f"<h2>When it happens</h2><p>{_prose(entry.when)}</p>",
        f"<h2>Common situations</h2>{_list('ul', entry.situations)}",
        f"<h2>In client code</h2><pre>{escape(entry.example)}</pre>",
        f"<h2>For programs</h2><table>{facts}</table>",
        f"<h2>Also printed as</h2><ul>{further}</ul>" if further else "",
        f"<h2>Related</h2><p>{', '.join(_link(code) for code in entry.related)}</p>",
        "<h2>Raised at</h2>" + "".join(map(_site_html, raised_at(entry.code))),
    ]
    return _page(entry.code, "\n".join(parts))


def index_html() -> str:
    """The page `/errors`: every code with its status and meaning."""
    rows = "".join(
        f"<tr><td>{_link(entry.code)}</td><td>{entry.spec.status}</td><td>{_prose(entry.meaning)}</td></tr>"
        for entry in entries()
    )
    head = "<tr><th>Code</th><th>Status</th><th>Meaning</th></tr>"
    return _page("Errors", f"<h1>Errors</h1>\n<table>{head}{rows}</table>")


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · Tectum</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _prose(text: str) -> str:
    """Escaped, with `code` set as such."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def _list(kind: str, lines: Iterable[str]) -> str:
    return f"<{kind}>" + "".join(f"<li>{_prose(line)}</li>" for line in lines) + f"</{kind}>"


def _link(code: str) -> str:
    return f'<a href="/errors/{escape(code)}"><code>{escape(code)}</code></a>'


def _site_html(site: Site) -> str:
    where = f"{site.file}:{site.line}" + (f" in {site.function}" if site.function else "")
    lines = []
    for number, line in _excerpt(site):
        shown = escape(f"{number:>5}  {line}")
        lines.append(f"<mark>{shown}</mark>" if number == site.line else shown)
    return f'<p class="soft">{escape(where)}</p><pre>' + "\n".join(lines) + "</pre>"


# --- terminal ---


def to_text(entry: Entry, color: bool, width: int = 100) -> str:
    """For `tectum explain CODE`: at most `width` columns, with colours where wanted and no escape codes otherwise."""
    from rich.console import Console

    output = io.StringIO()
    console = Console(
        file=output, width=width, force_terminal=color, no_color=not color, color_system="standard" if color else None,
        highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    for block in _blocks(entry, color):
        console.print(block)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def _blocks(entry: Entry, color: bool) -> Iterable[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    def heading(text: str) -> Text:
        return Text(f"\n{text}", style="bold")

    def inset(text: str, style: str = "") -> Padding:
        return Padding(Text(text, style=style), (0, 0, 0, 2))

    retry = "a retry makes sense" if entry.spec.retryable else "no retry: change something first"
    yield Text.assemble((entry.code, "bold red"), f"  {entry.spec.status} · gRPC {entry.spec.grpc} · {retry}")
    yield inset(entry.message, "red")
    yield Text(f"\n{entry.meaning}")
    yield heading("What to do")
    yield _numbered([f"{number}." for number in range(1, len(entry.todo) + 1)], entry.todo)
    yield heading("When it happens")
    yield inset(entry.when)
    yield heading("Common situations")
    yield _numbered(["-"] * len(entry.situations), entry.situations)
    yield heading(f"In client code ({entry.exception})")
    yield Padding(_python(entry.example, color), (0, 0, 0, 2))
    further = _further_messages(entry)
    if further:
        yield heading("Also printed as")
        yield _numbered(["-"] * len(further), further)
    yield heading("Raised at")
    for site in raised_at(entry.code):
        yield inset(f"{site.file}:{site.line}  {site.function}", "cyan")
        source = "\n".join(f"{number:>5}  {line}" for number, line in _excerpt(site))
        yield Padding(Text(source, style="dim", no_wrap=True, overflow="ellipsis"), (0, 0, 0, 2))
    yield heading("Related")
    yield inset(", ".join(entry.related))


def _numbered(marks: list[str], lines: Iterable[str]) -> RenderableType:
    """Lines behind their marks, continued below themselves when they are long."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for mark, line in zip(marks, lines, strict=True):
        table.add_row(mark, Text(line))
    return Padding(table, (0, 0, 0, 2))


def _python(source: str, color: bool) -> RenderableType:
    from rich.syntax import Syntax
    from rich.text import Text

    return Syntax(source, "python", theme="ansi_dark", background_color="default") if color else Text(source)


# --- Markdown ---


def to_markdown(entry: Entry) -> str:
    """`docs/errors/<code>.md`. Names files and functions, but no lines: those change with every edit."""
    facts = "\n".join(f"| {name} | {value} |" for name, value in _facts(entry).items())
    further = "\n".join(f"- `{message}`" for message in _further_messages(entry))
    places = dict.fromkeys(
        f"- `{site.file}`" + (f", `{site.function}`" if site.function else "") for site in raised_at(entry.code)
    )
    parts = [
        f"# {entry.code}",
        f"```text\n{entry.message}\n```",
        entry.meaning,
        "## What to do",
        "\n".join(f"{number}. {step}" for number, step in enumerate(entry.todo, start=1)),
        "## When it happens",
        entry.when,
        "## Common situations",
        "\n".join(f"- {line}" for line in entry.situations),
        "## In client code",
        f"```python\n{entry.example}\n```",
        "## For programs",
        f"| | |\n|---|---|\n{facts}",
        f"## Also printed as\n\n{further}" if further else "",
        "## Raised at",
        "\n".join(places),
        "## Related",
        ", ".join(f"[{code}]({code}.md)" for code in entry.related),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def index_markdown() -> str:
    """`docs/errors/README.md`: the list of codes."""
    rows = "\n".join(
        f"| [{entry.code}]({entry.code}.md) | {entry.spec.status} | {entry.meaning} |" for entry in entries()
    )
    return f"""# Errors

Every error that Tectum reports has a code. The code is stable, and its status is the same wherever it arrives.
`tectum explain CODE` prints a page of this list, and also takes a message or a log line; a running server shows it
under `/errors/CODE`.

These pages are generated: `python -m tectum.catalogue --write-docs docs/errors`.

| Code | Status | Meaning |
|---|---|---|
{rows}
"""
