"""The error catalogue: complete, true to the source, findable, and safe to show."""

from __future__ import annotations

import ast
import base64
import hashlib
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tectum
import tectum.errors
from tectum import catalogue
from tectum.catalogue import Entry, entries, entry, find, raised_at
from tectum.catalogue.__main__ import pages
from tectum.catalogue.search import is_case_of, known_messages
from tectum.catalogue.sites import all_codes_raised, sites_in
from tectum.errors import CODES, BadRequestError

ENTRIES = Path(inspect.getfile(catalogue)).parent / "entries"
DOCS = Path(__file__).parent.parent / "docs" / "errors"
ALL_CODES = pytest.mark.parametrize("code", CODES)


# --- complete ---


def test_every_code_has_an_entry_and_no_entry_is_left_over() -> None:
    assert {path.stem for path in ENTRIES.glob("*")} == set(CODES)


def test_every_raised_code_is_known() -> None:
    assert all_codes_raised() <= set(CODES)


@ALL_CODES
def test_every_entry_is_raised_somewhere(code: str) -> None:
    assert raised_at(code), f"{code} is explained, but nothing raises it"


@ALL_CODES
def test_an_entry_says_everything_in_few_words(code: str) -> None:
    found = entry(code)
    assert 1 <= len(found.situations) <= 8
    assert 1 <= len(found.todo) <= 6
    assert len(set(found.related)) == len(found.related) >= 2
    assert code not in found.related
    assert set(found.related) <= set(CODES)
    for text in (found.meaning, found.when, *found.situations, *found.todo):
        assert 10 < len(text) <= 600
        assert text.count("`") % 2 == 0, f"{code}: a `code` is not closed: {text}"


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(BadRequestError) as caught:
        entry("../errors")
    assert caught.value.code == "not_found"


# --- true to the source ---


@ALL_CODES
def test_the_message_of_an_entry_is_printed_by_a_site(code: str) -> None:
    printed = [site.message for site in raised_at(code) if site.message is not None]
    for message in (entry(code).message, *entry(code).messages):
        assert any(is_case_of(_filled(message), text) for text in printed), f"nothing prints {message!r}: {printed}"


def test_sites_are_read_by_the_rule() -> None:
    source = """
from tectum import errors
from tectum.errors import BadRequestError, error_class
LIMIT = "the limit"

class Door:
    def open(self, name, late):
        text = f"{name[:5]} is above {LIMIT}"
        raise BadRequestError("body_too_large", text)

    async def close(self):
        raise errors.InternalError("internal" if self else "encode_failed", "ended")

def passed_on(code):
    code_of_ours = "overloaded"
    raise error_class(code_of_ours)(code_of_ours, str(code))

def no_site(code, text):
    print("not_found", ValueError("not_found"), BadRequestError.from_problem({}))
    raise BadRequestError(code, text)
"""
    found = [(site.code, site.line, site.function, site.message) for site in sites_in("door.py", source)]
    assert found == [
        ("body_too_large", 9, "Door.open", "<name> is above the limit"),
        ("internal", 12, "Door.close", "ended"),
        ("encode_failed", 12, "Door.close", "ended"),
        ("overloaded", 16, "passed_on", None),
    ]


def test_a_site_shows_the_very_line_of_the_installed_source() -> None:
    (site,) = raised_at("request_conflict")
    root = Path(inspect.getfile(tectum)).parent.parent
    lines = (root / site.file).read_text().splitlines()
    assert '"request_conflict"' in lines[site.line - 1]
    assert list(site.source) == lines[site.first_line - 1 : site.first_line - 1 + len(site.source)]
    assert site.first_line < site.line < site.first_line + len(site.source)


# --- findable ---


@ALL_CODES
def test_each_message_finds_its_own_entry_first(code: str) -> None:
    for message in known_messages(entry(code)):
        if sum(map(str.isalpha, re.sub("<[^>]*>", "", message))) < 7:
            continue  # hardly more than its values, such as `<field>: <what is wrong>`
        line = f"2026-01-01 10:00:00 ERROR tectum.http {_filled(message)} (worker 3)"
        assert code in _equally_good(line, message), f"{message!r} finds {[e.code for e in find(line)]}"
        assert find(f"{_filled(message)} [{code}]")[0].code == code


@ALL_CODES
def test_each_code_is_found_as_it_stands_in_logs_problems_and_links(code: str) -> None:
    for text in (
        code,
        f"request ended req_id=internal-7 reason=encode_failed status=500 code={code} items=2",
        f'{{"type":"/errors/{code}","detail":"There is no such page","code":"{code}"}}',
        f"http://127.0.0.1:30100/errors/{code}",
        f"tectum.errors.MMError: The encoder is shutting down [{code}]",
    ):
        assert find(text)[0].code == code, text


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("Encoder request was released: 4f1c-77", ["request_released"]),
        ("no staged embedding for req_id=4f1c-77 (already released)", ["request_released"]),
        ("No embedding available for request: 4f1c-77", ["request_not_found", "embedding_not_ready"]),
        ("No embedding available for request: a (it is encoding); wait for it and a…", ["embedding_not_ready"]),
        (
            "RuntimeError: encoder  produced 120 tokens,\n but preprocessor metadata expected 128",
            ["row_mismatch"],
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", ["out_of_memory"]),
        ("CUDA out of memory", ["out_of_memory"]),
        ("404 Not Found", ["not_found"]),
        ("ModuleNotFoundError: No module named 'torch'", ["missing_dependency"]),
        ("the port is not found (deadline exceeded)", ["not_found", "deadline_exceeded"]),
    ],
)
def test_the_messages_that_operators_search_for(text: str, codes: list[str]) -> None:
    assert [found.code for found in find(text)][: len(codes)] == codes


def test_statuses_and_words_find_something_and_nonsense_nothing() -> None:
    assert [found.code for found in find("413")] == [code for code, spec in CODES.items() if spec.status == 413]
    assert {"port_in_use"} <= {found.code for found in find("another process listens on the port")}
    assert find("xyzzy plugh") == ()
    assert find("") == ()
    assert len(find("the server")) <= 5


def test_a_huge_paste_is_answered_at_once() -> None:
    assert find("Encoder produced " * 100_000) is not None  # the time-out of the test is the check


# --- shown ---


class _Reader(HTMLParser):
    """Tags, attributes and text of a page; a tag that is not closed in order raises."""

    VOID = ("meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@ALL_CODES
def test_a_page_is_self_contained_and_links_only_to_this_server(code: str) -> None:
    page = catalogue.to_html(entry(code))
    seen = _Reader(page)
    assert {tag for tag, _ in seen.tags}.isdisjoint({"script", "link", "img", "iframe", "form", "base"})
    for _, attributes in seen.tags:
        assert not any(name == "style" or name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "/errors").startswith(("/errors", "/api/errors"))
    for text in (entry(code).message, entry(code).example):
        assert text in seen.text, "the page shows it as it is"
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in catalogue.CONTENT_SECURITY_POLICY
    _Reader(catalogue.index_html())


def test_whatever_an_entry_holds_is_escaped() -> None:
    bad = '<script>alert("`1`")</script>&'
    hostile = Entry("internal", bad, bad, bad, (bad,), (bad,), bad, ("not_found",), (bad,))
    page = catalogue.to_html(hostile)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 7
    assert _Reader(page).text.count("<script>alert(") == 7


@ALL_CODES
def test_the_terminal_text_holds_everything_and_no_escape_codes(code: str) -> None:
    found = entry(code)
    plain = catalogue.to_text(found, color=False, width=100)
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 100
    words = plain.split()
    for text in (found.message, found.meaning, found.when, *found.situations, *found.todo, found.example):
        assert _is_within(text.split(), words), text
    assert "\x1b[" in catalogue.to_text(found, color=True)


def test_the_json_is_what_a_program_needs() -> None:
    answer = catalogue.to_json(entry("overloaded"))
    assert (answer["code"], answer["status"], answer["grpc"], answer["retryable"]) == (
        "overloaded",
        503,
        "RESOURCE_EXHAUSTED",
        True,
    )
    assert answer["exception"] == "UnavailableError"
    assert answer["page"] == BadRequestError("overloaded", "").to_problem()["type"]
    assert all(set(site) >= {"file", "line", "function", "source"} for site in answer["raised_at"])


@ALL_CODES
def test_examples_are_python_and_use_names_that_exist(code: str) -> None:
    tree = ast.parse(entry(code).example)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tectum"):
            module = {"tectum": tectum, "tectum.errors": tectum.errors}[str(node.module)]
            for alias in node.names:
                assert alias.name in {*vars(module), *getattr(module, "__all__", ())}, alias.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_client(node.func.value):
            method = getattr(tectum.Client, node.func.attr)
            inspect.signature(method).bind(None, *node.args, **{str(k.arg): k.value for k in node.keywords})


@ALL_CODES
def test_an_example_handles_the_class_that_is_raised(code: str) -> None:
    raised = tectum.errors.error_class(code)
    for node in ast.walk(ast.parse(entry(code).example)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            caught = [getattr(tectum.errors, kind.id, None) for kind in kinds if isinstance(kind, ast.Name)]
            assert any(kind is not None and issubclass(raised, kind) for kind in caught)


def test_the_docs_are_those_of_the_catalogue() -> None:
    found = {path.name: path.read_text("utf-8") for path in DOCS.glob("*")}
    assert found == pages(), "run: python -m tectum.catalogue --write-docs docs/errors"


def test_the_docs_name_no_lines() -> None:
    assert not [name for name, text in pages().items() if re.search(r"\.py\W+\d", text)]


def test_writing_the_docs_removes_pages_of_codes_that_are_no_more(tmp_path: Path) -> None:
    (tmp_path / "gone.md").write_text("old")
    subprocess.run([sys.executable, "-m", "tectum.catalogue", "--write-docs", str(tmp_path)], check=True)
    assert {path.name: path.read_text("utf-8") for path in tmp_path.glob("*")} == pages()


def test_it_is_light() -> None:
    """`tectum explain` works in the base install: nothing heavy is imported, and rich only to print."""
    program = (
        "import sys, tectum.catalogue as c; c.to_html(c.find('overloaded')[0]); "
        "print(sorted({'torch', 'numpy', 'fastapi', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- helpers ---


def _filled(message: str) -> str:
    """A message with a likely value for each placeholder."""
    return re.sub("<[^<>]*>", "v4-1", message)


def _equally_good(line: str, message: str) -> set[str]:
    """The first entry found, and those after it that print the very same words."""
    first = find(line)[0]
    words = re.sub("<[^<>]*>", "<>", message)
    same = {e.code for e in entries() if words in {re.sub("<[^<>]*>", "<>", m) for m in known_messages(e)}}
    return {first.code} | (same if first.code in same else set())


def _is_client(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "client"


def _is_within(wanted: list[str], words: list[str]) -> bool:
    """Whether `wanted` stands in `words` in order, wherever lines (or, in long words, pieces of lines) were broken."""
    return "".join(wanted) in "".join(words)
