"""`python -m tectum.catalogue --write-docs docs/errors`: write the pages of the docs from the catalogue."""

from __future__ import annotations

import argparse
from pathlib import Path

from tectum.catalogue import entries, index_markdown, to_markdown


def pages() -> dict[str, str]:
    """File name → text, of every page in `docs/errors`."""
    return {"README.md": index_markdown(), **{f"{entry.code}.md": to_markdown(entry) for entry in entries()}}


def write_docs(folder: Path) -> None:
    """Write every page to `folder` and remove the pages of codes that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for old in folder.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        folder.joinpath(name).write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tectum.catalogue", description="Write the error pages of the docs."
    )
    parser.add_argument("--write-docs", metavar="FOLDER", type=Path, required=True)
    write_docs(parser.parse_args().write_docs)


if __name__ == "__main__":
    main()
