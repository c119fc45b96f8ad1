"""The encoded images of one batch on their way into one tensor: decode calls and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.core.stats import Timed
from gpuprefetch.core.streams import mark_reader, wait_for_reader
from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.decode import claim, decode_packed, decode_part, place
from gpuprefetch.images.encoded import Call, Copy, PreparedImages
from gpuprefetch.images.plan import LARGE, WHOLE_BATCH_BYTES, lay_out, readable
from gpuprefetch.transforms.head import require_fixed_size
from gpuprefetch.transforms.kernel import HAS_TRITON
from gpuprefetch.transforms.launch import Coloring, Launches, Table, resample

if TYPE_CHECKING:
    from gpuprefetch.images.stage import Pipeline

ALIGNED = 16  # bytes: Triton compiles another kernel for an odd address


class ImageJob:
    """The encoded images of one batch, on their way into one tensor.

    Decoded images, or their packed copy, are let go after the launch that reads them. Their memory
    is not decoded into before that launch has completed. See Note [Decoded memory].
    """

    def __init__(self, pipeline: Pipeline, images: PreparedImages) -> None:
        self.images = images
        self.out: Any = [None] * len(images)
        self._pipeline = pipeline
        self._launches: Launches | None = None
        # The tensor that holds what the launches read, and where that starts and stops in it.
        self._numbers: tuple[torch.Tensor, int, int] | None = None
        self._survived: torch.Tensor | None = None
        if pipeline.head.names or pipeline.tail:
            require_fixed_size(pipeline.head, pipeline.tail)

    def begin(self, limit: int | None = None) -> list[Callable[[], None]]:
        """On the stream of the batch: reserve the result.

        Returns:
            The decode of each sub-batch, with pixels that workers decoded; none takes more than
            ``limit`` bytes.
        """
        pipeline, images = self._pipeline, self.images
        device, head = pipeline.device, pipeline.head
        size, plan = head.size, images.plan
        # Without engines a call takes as long whatever its size.
        room = WHOLE_BATCH_BYTES if pipeline.streams > 1 and len(plan.calls) > 1 else None
        if limit is not None or room is not None:
            words = images.words() if plan.table else None
            most = None if limit is None else limit // pipeline.copies
            plan = lay_out(images, size, words, most, room)
        if size is None:
            # The pixels themselves are the result, and the buffer is the worker's.
            ready = np.flatnonzero(images.decoded)
            pixels = images.pixels.to(device, non_blocking=True, copy=True)
            for i, image in zip(ready.tolist(), images.views(ready, pixels), strict=True):
                self.out[i] = image
            return [partial(self._decode, call=call) for call in plan.calls]
        if images.out is not None:  # on the CPU, with what the workers decoded
            self.out = images.out
            left = [call for call in plan.calls if len(call.positions)]
            return [partial(self._decode, call=replace(call, copy=None)) for call in left]
        dtype = pipeline.dtype or torch.float32
        layout = pipeline.memory_format or torch.contiguous_format
        shape = len(images), 3, *size
        self.out = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        table = plan.table if HAS_TRITON and dtype != torch.float64 else None
        return [
            partial(self._decode, call=call, launch=None if table is None else (table, number))
            for number, call in enumerate(plan.calls)
        ]

    def _decode(
        self, *, call: Call, launch: tuple[Table, int] | None = None, again: bool = False
    ) -> None:
        """Decode and resample a sub-batch; out of memory, make room and take smaller ones.

        Args:
            call: its images.
            launch: of all of them, if it was planned: its table, and its number in that.
            again: whether it is one image, or one copy, that has had a try.
        """
        try:
            if launch is None or not self._packs(call):
                self._decode_apart(call)
            elif not self._decode_packed(call, *launch):
                self._decode_apart(call, together=False)
        except torch.OutOfMemoryError as error:
            if again:
                if not len(call.positions):
                    raise
                raise self._too_large(int(call.positions[0])) from error
        else:
            return
        self._pipeline.make_room()
        pieces = [] if call.copy is None else [self.images.call(call.positions[:0], call.copy)]
        halves = np.array_split(call.positions, 2)
        pieces += [self.images.call(half) for half in halves if len(half)]
        for piece in pieces:
            self._decode(call=piece, again=len(pieces) == 1)

    def _packs(self, call: Call) -> bool:
        """Whether to decode into one piece."""
        decoder = self._pipeline.decoder
        return not len(call.positions) or (decoder is not None and decoder.packs)

    def _decode_packed(self, call: Call, table: Table, number: int) -> bool:
        """Whether it was done in one piece: see Note [One call for a batch]."""
        pipeline, images = self._pipeline, self.images
        decoder = pipeline.decoder if len(call.positions) else None
        launches, numbers, first, last = self._read_by(table)
        pixels = -(-(last - first) // ALIGNED) * ALIGNED
        with Timed(pipeline.stats, "resample" if decoder is None else "decode"):
            flat = place(pixels + call.copied + call.size, pipeline.device, pipeline.rooms)
            address = flat.data_ptr()
            # Nobody but torch keeps what is not in the batch until it is on the device.
            flat[: last - first].copy_(numbers[first:last], non_blocking=True)
            if decoder is not None and decoder.canaries:
                # See Note [Canaries].
                launches.set_canaries(number, address + pixels, address)
                self._mark_reader()
            self._wait_for_reader()
            if call.copy is not None:
                held, start, stop = images.held_copy(call.copy)
                copied = flat[pixels : pixels + call.copied]
                copied.copy_(held[start:stop], non_blocking=True)
            if decoder is not None:
                if not decode_packed(decoder, images, call, flat, pixels + call.copied):
                    return False
                pipeline.decodes_on(decoder.streams)
        with Timed(pipeline.stats, "resample"):
            flags = self._flags().data_ptr() if decoder is not None and decoder.canaries else 0
            launches.launch(number, address + pixels, address, survived=flags)
            self._mark_reader()
        return True

    def _flags(self) -> torch.Tensor:
        """``(N,)`` uint8 on the CPU, where a launch notes the canaries that it has found."""
        if self._survived is None:
            pinned, count = self._pipeline.device.type == "cuda", len(self.images)
            self._survived = torch.zeros(count, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._survived

    def check(self) -> None:
        """Decode once more what the engines have skipped, after all calls. See Note [Canaries]."""
        if self._survived is None:
            return
        with Timed(self._pipeline.stats, "decode"):
            self._mark_reader()
            self._wait_for_reader()
        missed = self._survived.numpy().nonzero()[0]
        if len(missed):
            self._pipeline.stats.add("missed_images", len(missed))
            self._decode_apart(self.images.call(missed), together=False)

    def _read_by(self, table: Table) -> tuple[Launches, torch.Tensor, int, int]:
        """The launches of a table, and the numbers that they read, see ``_numbers``."""
        if self._launches is None or self._numbers is None:
            head = self._pipeline.head
            self._launches = Launches(table, self.out, torch.uint8, head.interpolation)
            if table.words is None:
                self._numbers = self.images.held_numbers()
            else:
                coloring = Coloring(torch.uint8, self.out.dtype, head.mean, head.std)
                numbers = Launches.numbers(table, 3, coloring)
                numbers = numbers.pin_memory() if self.images.is_pinned else numbers
                self._numbers = numbers, 0, len(numbers)
        return self._launches, *self._numbers

    def _decode_apart(self, call: Call, *, together: bool = True) -> None:
        pipeline, device = self._pipeline, self._pipeline.device
        if call.copy is not None:
            self._copy_apart(call.copy)
        if not len(call.positions):
            return
        assert pipeline.decoder is not None, "without one, the packer leaves nothing to decode"
        with Timed(pipeline.stats, "resample"):
            self._wait_for_reader()
        with Timed(pipeline.stats, "decode"):
            if call.largest >= LARGE and not pipeline.decoder.packs:
                # A decoder of others' that runs out of memory is gone; another takes half a second.
                claim(call.size, device)
            images = decode_part(
                pipeline.decoder, self.images, call, device, pipeline.stats, together=together
            )
            pairs = zip(call.positions.tolist(), images, strict=True)
            decoded = {i: image for i, image in pairs if image is not None}
        with Timed(pipeline.stats, "resample"):
            if pipeline.head.size is None:
                for i, image in decoded.items():
                    self.out[i] = image.contiguous()  # else one would keep all in memory
            elif decoded:
                self._resample(np.array([*decoded]), [*decoded.values()])
            self._mark_reader()

    def _copy_apart(self, copy: Copy) -> None:
        held, first, last = self.images.held_copy(copy)
        pixels = held[first:last].to(self.out.device, non_blocking=True)
        views = self.images.views(copy.positions, pixels, copy.start)
        with Timed(self._pipeline.stats, "resample"):
            self._resample(copy.positions, views)
            self._mark_reader()

    def _mark_reader(self) -> None:
        """Have the next decode wait for what was launched."""
        if self._pipeline.device.type == "cuda":
            mark_reader(self._pipeline.device)

    def _wait_for_reader(self) -> None:
        """Until no kernel on this stream reads decoded images any more."""
        if self._pipeline.device.type == "cuda":
            wait_for_reader(self._pipeline.device)

    def _too_large(self, position: int) -> torch.OutOfMemoryError:
        device, (height, width) = self._pipeline.device, self.images.sizes[position].tolist()
        size = readable(3 * height * width)
        reason = f"out of memory on {device}, also alone; its {width} x {height} pixels take {size}"
        if device.type == "cuda":
            free, total = map(readable, torch.cuda.mem_get_info(device))
            used = readable(torch.cuda.memory_allocated(device))
            reason += f", {free} of {total} are free, and torch has {used} in use"
        bad = BadImage(int(self.images.indices[position]), self.images.paths[position], reason)
        return torch.OutOfMemoryError(f"{bad}. Take smaller batches, or leave it to the workers.")

    def _resample(self, positions: npt.NDArray[np.int64], images: Sequence[torch.Tensor]) -> None:
        """Queue the fused head of some decoded images on the current stream."""
        batch, head = self.images, self._pipeline.head
        assert batch.rows is not None
        turned = batch.transposed[positions].tolist()
        resample(
            [image.mT if turn else image for image, turn in zip(images, turned, strict=True)],
            batch.rows[positions],
            head.size,  # type: ignore[arg-type]
            antialias=head.antialias,
            dtype=self.out.dtype,
            out=self.out,
            positions=positions.tolist(),
            interpolation=head.interpolation,
            mean=head.mean,
            std=head.std,
        )
