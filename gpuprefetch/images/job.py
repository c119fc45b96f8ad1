"""The encoded images of one batch on their way into a tensor a view: decode calls and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.core.stats import Timed
from gpuprefetch.core.streams import drain
from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.decode import decode_packed, decode_part, place
from gpuprefetch.images.encoded import Call, PreparedImages
from gpuprefetch.images.plan import WHOLE_BATCH_BYTES, lay_out, readable
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.kernel import HAS_TRITON
from gpuprefetch.transforms.launch import Launches, Table

if TYPE_CHECKING:
    from gpuprefetch.images.stage import Pipeline

ALIGNED = 16  # bytes: Triton compiles another kernel for an odd address


@dataclass
class Output:
    """What one view makes of a batch."""

    head: Head
    rows: npt.NDArray[np.float64] | None  # (N, 2, 6), the sampling; None where there is none
    out: Any  # the result, (N, 3, H, W); a list of N images where it has no fixed size


class ImageJob:
    """The encoded images of one batch, on their way into a tensor for each view.

    Decoded images, or their packed copy, are let go after the launches that read them. Their memory
    is not decoded into before those have completed. See Note [Decoded memory].
    """

    def __init__(self, pipeline: Pipeline, images: PreparedImages) -> None:
        self.images = images
        views = zip(pipeline.views, images.rows, strict=True)
        self.outputs = [Output(view.head, rows, [None] * len(images)) for view, rows in views]
        self._pipeline = pipeline
        # What the planned launches read; those of each view, and where in it theirs begins.
        self._numbers: torch.Tensor | None = None
        self._launches: list[tuple[Launches, int]] = []
        # (N,) uint8 on the CPU, where a launch notes the canaries that it has found.
        self._survived: torch.Tensor | None = None
        for view in pipeline.views:
            if view.head.names or view.tail or view.refused:
                view.require_files()

    def begin(self, limit: int | None = None) -> list[Callable[[], None]]:
        """Reserve the result; the decode of each sub-batch, of at most ``limit`` bytes."""
        pipeline, images = self._pipeline, self.images
        calls, tables = images.calls, images.tables
        sizes = pipeline.packer.sizes
        # Without engines a call takes as long whatever its size.
        room = WHOLE_BATCH_BYTES if pipeline.streams > 1 and len(calls) > 1 else None
        replanned = limit is not None or room is not None
        if replanned:
            words = [images.words(view) for view in range(len(tables))]
            most = None if limit is None else limit // pipeline.copies
            calls, tables = lay_out(images, sizes, words, most, room)
        if not sizes:
            # The pixels themselves are the result, and the buffer is the worker's.
            ready = np.flatnonzero(images.decoded)
            pixels = images.pixels.to(pipeline.device, non_blocking=True, copy=True)
            pictures = images.pictures(ready, pixels)
            for i, image in zip(ready.tolist(), pictures, strict=True):
                self.outputs[0].out[i] = image
            return [partial(self._decode, call=call) for call in calls]
        if images.out:  # on the CPU, with what the workers decoded
            for output, out in zip(self.outputs, images.out, strict=True):
                output.out = out
            left = [images.call(call.positions) for call in calls if len(call.positions)]
            return [partial(self._decode, call=call) for call in left]
        for output in self.outputs:
            output.out = output.head.empty(len(images), pipeline.device)
        double = any(output.out.dtype == torch.float64 for output in self.outputs)
        if not tables or not HAS_TRITON or double:
            return [partial(self._decode, call=call) for call in calls]
        self._prepare(tables, again=replanned)
        return [partial(self._decode, call=call, launch=n) for n, call in enumerate(calls)]

    def _prepare(self, tables: Sequence[Table], *, again: bool) -> None:
        """Prepare the launches of all views, and what they read; ``again`` if it was not kept."""
        images, pairs = self.images, list(zip(self.outputs, tables, strict=True))
        starts, held = images.numbers, images.buffer
        numbers = held.memory[held.start + starts[0] : held.start + starts[-1]]
        if again:
            parts = [Launches.numbers(t, o.head.colors) for o, t in pairs]
            numbers = torch.cat(parts)
            numbers = numbers.pin_memory() if held.is_pinned else numbers
            starts = [0, *np.cumsum([*map(len, parts)]).tolist()]
        self._numbers = numbers
        for (output, table), start in zip(pairs, starts, strict=False):
            launches = Launches(table, output.out, torch.uint8, output.head.interpolation)
            self._launches.append((launches, start - starts[0]))

    def _decode(self, *, call: Call, launch: int | None = None, again: bool = False) -> None:
        """Decode and resample a sub-batch; out of memory, make room and take smaller ones.

        ``launch`` is the number of the one that was planned; ``again`` is for the second try.
        """
        try:
            if launch is None or not self._packs(call):
                self._decode_apart(call)
            elif not self._decode_packed(call, launch):
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
        decoder = self._pipeline.decoder
        return not len(call.positions) or (decoder is not None and decoder.packs)

    def _decode_packed(self, call: Call, number: int) -> bool:
        """Whether it was done in one piece: see Note [One call for a batch]."""
        pipeline, images = self._pipeline, self.images
        decoder = pipeline.decoder if len(call.positions) else None
        checked = decoder is not None and decoder.canaries  # see Note [Canaries]
        numbers = self._numbers
        assert numbers is not None
        pixels = -(-len(numbers) // ALIGNED) * ALIGNED
        with Timed(pipeline.stats, "resample" if decoder is None else "decode"):
            flat = place(pixels + call.copied + call.size, pipeline.device, pipeline.rooms)
            address = flat.data_ptr()
            # Nobody but torch keeps what is not in the batch until it is on the device.
            flat[: len(numbers)].copy_(numbers, non_blocking=True)
            launches = [(run, address + start) for run, start in self._launches]
            if checked:
                run, read = launches[0]
                run.set_canaries(number, address + pixels, read)
            if decoder is not None:
                self._drain()
            if call.copy is not None:
                copied = flat[pixels : pixels + call.copied]
                copied.copy_(images.pixels_of(call.copy), non_blocking=True)
            if decoder is not None:
                if not decode_packed(decoder, images, call, flat, pixels + call.copied):
                    return False
                pipeline.decodes_on(decoder.streams)
        with Timed(pipeline.stats, "resample"):
            flags = 0
            if checked:
                if self._survived is None:
                    pinned, count = pipeline.device.type == "cuda", len(images)
                    on_host: Any = {"dtype": torch.uint8, "device": "cpu", "pin_memory": pinned}
                    self._survived = torch.zeros(count, **on_host)
                flags = self._survived.data_ptr()
            for run, read in launches:
                run.launch(number, address + pixels, read, survived=flags)
                flags = 0  # the first view tells
        return True

    def check(self) -> None:
        """Decode once more what the engines have skipped, after all calls. See Note [Canaries]."""
        if self._survived is None:
            return
        with Timed(self._pipeline.stats, "decode"):
            self._drain()
        # A worker's picture may have that color.
        missed = np.flatnonzero(self._survived.numpy() > self.images.decoded)
        if len(missed):
            self._pipeline.stats.add("missed_images", len(missed))
            self._decode_apart(self.images.call(missed), together=False)

    def _decode_apart(self, call: Call, *, together: bool = True) -> None:
        pipeline, device = self._pipeline, self._pipeline.device
        if (copy := call.copy) is not None:
            pixels = self.images.pixels_of(copy).to(device, non_blocking=True)
            with Timed(pipeline.stats, "resample"):
                for view, output in enumerate(self.outputs):
                    pictures = self.images.pictures(copy.positions, pixels, copy.start, view)
                    self._resample(output, copy.positions, pictures)
        if not len(call.positions):
            return
        assert pipeline.decoder is not None, "without one, the packer leaves nothing to decode"
        with Timed(pipeline.stats, "decode"):
            self._drain()
            images = decode_part(
                pipeline.decoder, self.images, call, device, pipeline.stats, together=together
            )
            pairs = zip(call.positions.tolist(), images, strict=True)
            decoded = {i: image for i, image in pairs if image is not None}
        with Timed(pipeline.stats, "resample"):
            if not pipeline.packer.sizes:
                for i, image in decoded.items():
                    # Else one would keep all in memory.
                    self.outputs[0].out[i] = image.contiguous()
            elif decoded:
                for output in self.outputs:
                    self._resample(output, np.array([*decoded]), [*decoded.values()])

    def _drain(self) -> None:
        """Wait until no kernel on this stream reads what the decoder may write to."""
        if self._pipeline.device.type == "cuda":
            drain(self._pipeline.device)

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

    def _resample(
        self, output: Output, positions: npt.NDArray[np.int64], images: Sequence[torch.Tensor]
    ) -> None:
        """Queue the fused transforms of some decoded images on the current stream."""
        assert output.rows is not None
        turned = self.images.transposed[positions].tolist()
        upright = [image.mT if turn else image for image, turn in zip(images, turned, strict=True)]
        assert output.head.size is not None
        way: Any = {"dtype": output.out.dtype, "out": output.out, "positions": positions.tolist()}
        output.head.resample(upright, output.rows[positions], output.head.size, **way)
