"""Pictures on a terminal: two pixels a character cell, the upper one as ink and the lower one as ground."""

from __future__ import annotations

from typing import Any

from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text


def can_show(console: Console) -> bool:
    """Whether pictures would be recognised: a terminal with at least 256 colors."""
    return console.is_terminal and console.color_system in ("256", "truecolor", "windows")


def preview(picture: Any, columns: int) -> Text:
    """A PIL picture as `columns` cells a line, with its own aspect ratio."""
    width, height = picture.size
    lines = max(1, round(columns * height / width / 2))
    small = picture.convert("RGB").resize((columns, 2 * lines), Image.Resampling.BOX)
    text = Text(no_wrap=True)
    for line in range(lines):
        for column in range(columns):
            upper, lower = (small.getpixel((column, 2 * line + part)) for part in (0, 1))
            text.append("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        text.append("\n")
    text.right_crop(1)
    return text
