"""What the stage asks of a random policy: four methods, in the worker or in the prefetch thread."""

from collections.abc import Sequence
from typing import Protocol

import torch

from gpuprefetch.policies.ops import Sample
from gpuprefetch.policies.ops_launch import Layout
from gpuprefetch.policies.program import Program, Share
from gpuprefetch.transforms.random import Keys


class Policy(Protocol):
    """Random transforms that sample for each image.

    First a worker samples programs, then it carries them out, or lays them out for the GPU, where
    the prefetch thread carries them out. Two photos after a crop to 224 pixels, for instance::

        form = torch.empty((2, 3, 224, 224), dtype=torch.uint8, device="meta")
        programs = policy.drawn(keys, form)              # in the worker; keys are (2,)
        laid = policy.lay_out(form, programs)            # in the worker
        images = policy.carry_out(images, laid)          # in the prefetch thread, on the GPU
        boxes = policy.carry_out_one(boxes, programs, 1)  # the second photo's boxes follow it
    """

    def drawn(self, keys: Keys, images: torch.Tensor, /) -> list[Program]:
        """Sample what is done to images.

        Args:
            keys: ``(N,)``; the same key gives an image the same parameters.
            images: ``(N, C, H, W)``, of which only the form counts; they may be on "meta".
        """

    def lay_out(self, images: torch.Tensor, programs: Sequence[Program], /) -> Sequence[Layout]:
        """Prepare programs for the kernels, whatever the device is here.

        Args:
            images: ``(N, C, H, W)``, of which only the form counts; they may be on "meta".
            programs: what :meth:`drawn` gave for the same form.
        """

    def carry_out(
        self,
        images: torch.Tensor,
        programs: Sequence[Program | Layout],
        share: Share | None = None,
        /,
    ) -> torch.Tensor:
        """Transform images as sampled.

        Args:
            images: ``(N, C, H, W)``; left untouched.
            programs: what :meth:`drawn` or :meth:`lay_out` gave for images of this form.
            share: gets the tensor for the result before it is written, on the CPU.

        Returns:
            ``(N, C, H, W)``, of the dtype and memory format that the policy ends in.
        """

    def carry_out_one(self, sample: Sample, programs: Sequence[Program], row: int, /) -> Sample:
        """Do to a sample, without conversions, what is done to image ``row``.

        Args:
            sample: an image ``(C, H, W)`` or PIL, or boxes, a mask or points of
                ``torchvision.tv_tensors``, which only ops that move pixels change.
            programs: what :meth:`drawn` gave.
            row: 0 to N - 1.
        """
