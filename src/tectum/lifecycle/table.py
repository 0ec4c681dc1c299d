"""The state table as text, made from the code's own `TABLE`: `python -m tectum.lifecycle.table --write docs/lifecycle.md`.

Reads the machine and prints it; decides nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tectum.lifecycle.events import State
from tectum.lifecycle.machine import TABLE

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def markdown() -> str:
    """One line a cell of the table: state, event, next state, what follows. Then the diagram."""
    lines = ["| state | event | next state | what follows |", "|---|---|---|---|"]
    for state, moves in TABLE.items():
        for event, move in moves.items():
            following = (move.action.__doc__ or "").strip().splitlines()[0]
            lines.append(
                f"| {state} | {event.__name__} | {_next(state, move.to, move.action.__name__)} | {following} |"
            )
    lines.append("\nAn event without a line in its state cannot happen there: the shell that sends it is at fault.\n")
    return "\n".join([*lines, "```mermaid", "stateDiagram-v2", *diagram(), "```"])


def diagram() -> list[str]:
    """The moves that change the state, as lines of a mermaid diagram."""
    seen = ["    [*] --> accepted: Accept"]
    for state, moves in TABLE.items():
        for event, move in moves.items():
            target = _next(state, move.to, move.action.__name__)
            if target != str(state):
                for one in target.split(" or "):
                    seen.append(f"    {state} --> {one}: {event.__name__}")
    return [
        *dict.fromkeys(line for line in seen if line.split(" --> ")[0].strip() != line.split(" --> ")[1].split(":")[0])
    ]


_DECIDED = {
    "_ask_release": "draining or released",
    "_fail": "released",
    "_lose_inputs": "released",
    "_caller_left": "{state} or draining or released",
    "_confirm": "{state} or draining or released",
    "_lose": "{state} or draining or released",
    "_end_stage": "draining or released",
    "_end_stage_if_any": "draining or released",
    "_end_send": "draining or released",
}


def _next(state: State, to: State | None, action: str) -> str:
    return str(to) if to is not None else _DECIDED[action].format(state=state)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tectum.lifecycle.table", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this file")
    arguments = parser.parse_args()
    if arguments.write is None:
        print(markdown())
        return
    text = arguments.write.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    arguments.write.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{after}")


if __name__ == "__main__":
    main()
