"""Draw policies.jpg: a photo and seven draws of it by each policy of torchvision's.

    python docs/policies.py PHOTO

The published picture has scikit-image's ``skimage/data/chelsea.png``, which is CC0.
"""

import sys
import tempfile
from pathlib import Path

from gpuprefetch import DataPrefetcher, EncodedImageFolder
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import DataLoader
from torchvision.transforms import v2

POLICIES = (v2.TrivialAugmentWide, v2.RandAugment, v2.AutoAugment, v2.AugMix)
HEADING = 22  # pixels


def sheet_of(photo, policy):
    """Return the photo beside seven draws, under the name of the policy."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root, "photos", photo.name)
        path.parent.mkdir()
        path.write_bytes(photo.read_bytes())
        pipeline = [v2.Resize(224), v2.CenterCrop(224), policy()]
        loader = DataLoader(EncodedImageFolder(root))
        sheet = DataPrefetcher(loader, transforms=pipeline, seed=0).preview(
            1, draws=7, side=128
        )
    headed = Image.new("RGB", (sheet.width, sheet.height + HEADING), "white")
    headed.paste(sheet, (0, HEADING))
    font = ImageFont.load_default(15)
    ImageDraw.Draw(headed).text((6, 4), policy.__name__, "black", font)
    return headed


def main(photo):
    sheets = [sheet_of(Path(photo), policy) for policy in POLICIES]
    whole = Image.new(
        "RGB", (sheets[0].width, sum(sheet.height for sheet in sheets)), "white"
    )
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    whole.save(Path(__file__).with_suffix(".jpg"), quality=80, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
