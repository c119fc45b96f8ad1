"""A GPU op of one's own: a 2 x 2 grid that cuts each image into four.

    python custom_op.py            # on pictures that it draws itself
    python custom_op.py FOLDER     # class/*.jpg

What stands in ``transforms`` after the crop and the flip is any callable on an ``(N, C, H, W)``
batch. It runs on the prefetcher's stream, ahead of the loop, and may return what it likes: here
four batches.
"""

import sys
from pathlib import Path

import kornia.augmentation as K
import torch
from torch.utils.data import DataLoader

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop


def quarters(images):
    """``(N, C, H, W)`` into four ``(N, C, H / 2, W / 2)``, row by row."""
    height = images.shape[-2] // 2
    width = images.shape[-1] // 2
    top = images[..., :height, :]
    bottom = images[..., height:, :]
    return [part for half in (top, bottom) for part in (half[..., :width], half[..., width:])]


def main(root, batch_size=64, size=128):
    dataset = EncodedImageFolder(root)
    loader = DataLoader(dataset, batch_size, shuffle=True, num_workers=2, pin_memory=True)
    transforms = [RandomResizedCrop(size), K.RandomHorizontalFlip(), quarters]
    for (a, b, c, d), target in DataPrefetcher(loader, transforms=transforms):
        whole = torch.cat([torch.cat([a, b], -1), torch.cat([c, d], -1)], -2)
        print(f"4 x {tuple(a.shape)} of {tuple(whole.shape)}, {len(target)} targets, {a.device}")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent / "imagenet"))
    from draw import drawn_folder

    main(sys.argv[1] if len(sys.argv) > 1 else drawn_folder() / "val")
