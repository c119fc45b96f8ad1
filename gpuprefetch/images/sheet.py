"""A contact sheet: pictures with titles in a grid, boxes, masks and points drawn, by Pillow."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

    from gpuprefetch.images.walk import Follower
    from gpuprefetch.transforms.sampling import Size

GAP = 6  # pixels between tiles
GROUP_GAP = 22  # between a sample's tiles and the next one's
LINE = 13  # height of a line of a title
LINES = 3  # of a title at most
FONT_SIZE = 11
CHARACTER = 5.7  # mean width of one in that font
# For boxes and masks, told apart on light and dark ground.
COLORS = ("#ff3b30", "#34c759", "#0a84ff", "#ffcc00", "#bf5af2", "#ff9500", "#00c7be")
SHADE = 110  # how opaque masks are, of 255


@dataclass(frozen=True, slots=True)
class Tile:
    """One picture of the sheet."""

    picture: Image | None  # RGB; None leaves the place empty
    title: str
    followers: Sequence[Follower] = ()  # boxes, masks and points, in pixels of a picture of ...
    size: Size | None = None  # ... this height and width; None for those of `picture`

    def titled(self, title: str) -> Tile:
        """The same picture under another title."""
        return replace(self, title=title)

    def lines(self, side: int) -> list[str]:
        """The title, as it fits under a picture of this width."""
        lines = textwrap.wrap(self.title, max(int(side / CHARACTER), 1))
        return lines if len(lines) <= LINES else [*lines[: LINES - 1], lines[LINES - 1][:-1] + "…"]


def contact_sheet(groups: Sequence[Sequence[Tile]], side: int, *, across: int = 8) -> Image:
    """Lay groups of tiles out, about ``across`` tiles in a row; a group stays in one row.

    ``side`` is the longer side of a picture on the sheet, in pixels.
    """
    from PIL import Image, ImageDraw

    longest = max(map(len, groups))
    columns = min(max(across // longest, 1), len(groups))
    rows = -(-len(groups) // columns)
    group_width = longest * (side + GAP) - GAP
    lines = max(len(tile.lines(side)) for group in groups for tile in group)
    height = side + lines * LINE + 2 * GAP
    width = columns * (group_width + GROUP_GAP) - GROUP_GAP + 2 * GAP
    sheet = Image.new("RGB", (width, rows * height + GAP), "white")
    sheet.info["titles"] = [[tile.title for tile in group] for group in groups]
    draw = ImageDraw.Draw(sheet)
    for number, group in enumerate(groups):
        row, column = divmod(number, columns)
        left = GAP + column * (group_width + GROUP_GAP)
        for place, tile in enumerate(group):
            _put(sheet, draw, tile, (left + place * (side + GAP), GAP + row * height), side)
    return sheet


def _put(sheet: Image, draw: ImageDraw, tile: Tile, corner: tuple[int, int], side: int) -> None:
    from PIL import Image, ImageFont

    left, top = corner
    font = ImageFont.load_default(FONT_SIZE)
    for number, line in enumerate(tile.lines(side)):
        draw.text((left, top + side + number * LINE), line, "black", font)
    if tile.picture is None:
        draw.rectangle((left, top, left + side - 1, top + side - 1), outline="#cccccc")
        return
    picture = tile.picture
    scale = side / max(picture.size)
    size = (max(round(picture.width * scale), 1), max(round(picture.height * scale), 1))
    # Small pictures keep their pixels visible.
    small = picture.resize(
        size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC
    )
    height, width = tile.size or (picture.height, picture.width)
    small = _with_followers(small, tile.followers, (width, height))
    sheet.paste(small, (left + (side - size[0]) // 2, top + (side - size[1]) // 2))


def _with_followers(picture: Image, followers: Sequence[Follower], of: tuple[int, int]) -> Image:
    """The picture with what stands beside it; ``of`` is the width and height these are for."""
    from PIL import ImageDraw
    from torchvision import tv_tensors

    stretch = torch.tensor([picture.width / of[0], picture.height / of[1]], dtype=torch.float64)
    for mask in (each for each in followers if isinstance(each, tv_tensors.Mask)):
        picture = _shaded(picture, mask)
    draw = ImageDraw.Draw(picture)
    for follower in followers:
        if isinstance(follower, tv_tensors.BoundingBoxes):
            for number, corners in enumerate(_outlines(follower) * stretch):
                points = [(x, y) for x, y in corners.tolist()]
                draw.polygon(points, outline=COLORS[number % len(COLORS)], width=2)
        elif isinstance(follower, tv_tensors.KeyPoints):
            points = follower.as_subclass(torch.Tensor).reshape(-1, 2) * stretch
            for number, (x, y) in enumerate(points.tolist()):
                color = COLORS[number % len(COLORS)]
                draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=color, outline="white")
    return picture


def _outlines(boxes: Follower) -> torch.Tensor:
    """``(P, 4, 2)`` float64, x and y of the corners of all boxes that have an area."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    assert isinstance(boxes, tv_tensors.BoundingBoxes)
    values = boxes.as_subclass(torch.Tensor).double()
    rotated = values.shape[-1] != 4
    kinds = tv_tensors.BoundingBoxFormat
    wanted = kinds.XYXYXYXY if rotated else kinds.XYXY
    values = F.convert_bounding_box_format(values, boxes.format, wanted)
    corners = values if rotated else values[:, [0, 1, 2, 1, 2, 3, 0, 3]]
    corners = corners.reshape(-1, 4, 2)
    spans = corners.amax(1) - corners.amin(1)
    shown: torch.Tensor = corners[(spans > 0).all(1)]
    return shown


def _shaded(picture: Image, mask: Follower) -> Image:
    """The picture with a color for each value of a mask but 0, or for each of several masks."""
    from PIL import Image

    values = mask.as_subclass(torch.Tensor)
    planes = values.reshape(-1, *values.shape[-2:])
    if len(planes) > 1:
        regions = [plane != 0 for plane in planes]
    else:
        regions = [planes[0] == value for value in planes.unique().tolist() if value]
    for number, region in enumerate(regions):
        shade = Image.fromarray(region.to(torch.uint8).mul(SHADE).numpy())
        shade = shade.resize(picture.size, Image.Resampling.NEAREST)
        color = Image.new("RGB", picture.size, COLORS[number % len(COLORS)])
        picture = Image.composite(color, picture, shade)
    return picture
