"""Where the time of a batch goes, as a picture: a bar for each thread, drawn by Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH = 900  # pixels, of the picture
MARGIN = 12
BAR = 26  # height
LINE = 20  # of text
FONT_SIZE = 13


class Part(NamedTuple):
    """A part of a bar."""

    name: str
    ms: float
    color: str


class Bar(NamedTuple):
    """The time of one batch in one thread, or in the workers together."""

    title: str
    parts: Sequence[Part]

    @property
    def ms(self) -> float:
        """The length of the bar."""
        return sum(part.ms for part in self.parts)


def draw_bars(heading: Sequence[str], bars: Sequence[Bar]) -> Image:
    """Draw bars of one scale below each other, with the milliseconds of each part.

    ``heading`` has the lines of text above them.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(FONT_SIZE)
    row = 2 * LINE + BAR + MARGIN
    above = MARGIN + len(heading) * LINE + MARGIN
    height = above + len(bars) * row
    picture = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(heading):
        draw.text((MARGIN, MARGIN + number * LINE), line, "black", font)
    scale = (WIDTH - 2 * MARGIN) / max(bar.ms for bar in bars)
    for number, bar in enumerate(bars):
        top = above + number * row
        draw.text((MARGIN, top), f"{bar.title}: {bar.ms:,.1f} ms a batch", "black", font)
        left = float(MARGIN)
        text_left = float(MARGIN)
        for part in bar.parts:
            right = left + part.ms * scale
            box = (round(left), top + LINE, max(round(right) - 1, round(left)), top + LINE + BAR)
            draw.rectangle(box, fill=part.color)
            left = right
            label = f"{part.name} {part.ms:,.1f}"
            mark = (text_left, top + LINE + BAR + 6, text_left + 9, top + LINE + BAR + 15)
            draw.rectangle(mark, fill=part.color)
            draw.text((text_left + 14, top + LINE + BAR + 2), label, "black", font)
            text_left += 14 + draw.textlength(label, font) + 2 * MARGIN
    return picture
