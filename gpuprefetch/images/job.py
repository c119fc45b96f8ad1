"""The encoded images of one batch become a tensor for each view: decode calls and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from gpuprefetch.core.stats import Stats, Timed
from gpuprefetch.images.bad import BadImage
from gpuprefetch.images.decode import ImageDecoder, RefusedError, refusals
from gpuprefetch.images.decoding import Decoding
from gpuprefetch.images.header import decode_cpu
from gpuprefetch.images.host_memory import memory_for
from gpuprefetch.images.plan import WHOLE_BATCH_BYTES, lay_out, readable
from gpuprefetch.images.prepared import Call, Part, Plan, PreparedImages, Upload
from gpuprefetch.images.rows import PendingImages
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.launch import CANARY, Launches, runs_on
from gpuprefetch.transforms.pieces import Pieces
from gpuprefetch.transforms.reference import Doubles, Ints
from gpuprefetch.transforms.sampling import Sizes

# Note [Together]
# A call for 64 photos fills the engines badly: those of an H200 decode 12,500 photos a second in
# such calls, and 19,600 in calls of 256. The prefetch thread has its fixed work four times as
# often, too. So it takes up to 256 images of batches that the loader has already, and one call
# decodes them. Each batch has its own launch, result and event. If anything goes wrong, the batches
# are begun anew, one by one: an error is that of its batch, and those before it reach the loop.

ALIGNED = 16  # bytes: Triton compiles another kernel for an odd address


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one view."""

    head: Head
    rows: Doubles | None  # (N, 2, 6), the sampling; None without a fixed size
    # (N, 3, H, W), or what the transforms after the fused ones made of it. N images (3, H_i, W_i)
    # where each has its own size: in one buffer, or a list.
    out: object

    @property
    def images(self) -> object:
        """The same, with a list for images of their own sizes."""
        return list(self.out) if isinstance(self.out, Pieces) else self.out

    @property
    def finished(self) -> object:
        """What the loop gets."""
        form = self.head.form
        if form is None or not form.has_own_sizes or not isinstance(self.out, Pieces | list):
            return self.out
        return form.joined(self.out)


@dataclass(slots=True)
class _Launched:
    """The launches of a batch, and what they read."""

    tables: torch.Tensor  # 1-D uint8 on the CPU, the launch tables of all views
    views: Sequence[tuple[Launches, int]]  # of each view, and the first byte of its table
    # (N,) uint8 in pinned memory, where a launch notes the canaries that it has found; None before
    # a call with canaries.
    survived: torch.Tensor | None = None

    def flags(self, images: int, *, pinned: bool) -> int:
        """The address of a byte for each image, zeros before the first launch."""
        if self.survived is None:
            self.survived = torch.zeros(images, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self.survived.data_ptr()

    @property
    def pictures_at(self) -> int:
        """The byte of scratch, after the tables, at which pictures may begin."""
        return -(-len(self.tables) // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a decode failed."""

    reason: str | None  # of the decoder, which refuses a file; None for a lack of memory


class ImageJob(PendingImages):
    """The encoded images of one batch, which become a tensor for each view.

    A part goes through these steps, each only if the one before fails or is not possible::

        decode and launch   one call, one launch a view, as planned
        decode apart        the call's files, into other memory, and another launch
        decode halves       both halves of the call apart, and their halves
        on the CPU          a single file that the decoder refuses

    Decoded pictures are dropped after the launches that read them. Nothing is decoded into their
    memory before these have completed: see Note [Decoded memory].

    Args:
        images: as a worker has prepared them.
        heads: the fused transforms of each view.
        decoding: of the epoch.
        learned: called once if the first decode shows that CUDA kernels decode.
    """

    def __init__(
        self,
        images: PreparedImages,
        heads: Sequence[Head],
        decoding: Decoding,
        learned: Callable[[], None] = lambda: None,
    ) -> None:
        self.images = images
        self.outputs = [
            Output(head, rows, [None] * len(images))
            for head, rows in zip(heads, images.rows, strict=True)
        ]
        self._decoding = decoding
        self._learned = learned
        self._launched: _Launched | None = None
        self._parts: Sequence[Part] = ()

    @property
    def _stats(self) -> Stats:
        return self._decoding.stats

    @property
    def _decoder(self) -> ImageDecoder:
        decoder = self._decoding.decoder
        assert decoder is not None, "without a decoder the packer leaves nothing to the device"
        return decoder

    def begin(self, limit: int | None = None) -> list[Callable[[], None]]:
        """Allocate the results; what is still to be called, one function a part.

        The pictures of a part need ``limit`` bytes at most.
        """
        images = self.images
        sizes = [output.head.size for output in self.outputs if output.head.size is not None]
        plan, kept = self._plan(sizes, limit)
        parts = plan.parts
        if not sizes:
            self._hand_over_pixels()
        elif images.made.out:  # on the CPU, with what the workers decoded
            for view, (output, memory) in enumerate(
                zip(self.outputs, images.made.out, strict=True)
            ):
                self.replace_result(view, output.head.results(memory))
            parts = [Part(None, part.call) for part in parts]
        else:
            for view, output in enumerate(self.outputs):
                result = output.head.empty_results(len(images), self._decoding.device)
                self.replace_result(view, result)
            if plan.tables and self._can_launch():
                self._launched = self._launches(plan, kept=kept)
        self._parts = parts
        return [partial(self._run, part, number) for number, part in enumerate(parts)]

    @property
    def finished(self) -> list[object]:
        """What the loop gets of each view."""
        return [output.finished for output in self.outputs]

    def result(self, view: int) -> object:
        """What a view makes of the batch, as far as it has come."""
        return self.outputs[view].images

    def replace_result(self, view: int, result: object) -> None:
        """Put in place of a view's result what was made of it."""
        self.outputs[view] = replace(self.outputs[view], out=result)

    def _plan(self, sizes: Sequence[Sizes], limit: int | None) -> tuple[Plan, bool]:
        """The worker's plan and True; another plan and False if that does not fit."""
        images = self.images
        calls = sum(part.call is not None for part in images.plan.parts)
        # Without engines a call needs as long whatever its size.
        whole = WHOLE_BATCH_BYTES if self._decoding.streams > 1 and calls > 1 else None
        if limit is None and whole is None:
            return images.plan, True
        own_sizes = [output.head.has_own_sizes for output in self.outputs]
        words = [
            images.words(view, own_sizes=own_sizes[view]) for view in range(len(images.plan.tables))
        ]
        most = None if limit is None else limit // self._decoding.copies
        return lay_out(images, sizes, words, most, whole), False

    def _can_launch(self) -> bool:
        """Whether the kernel resamples here: it runs on a GPU, and does not compute in float64."""
        runs = runs_on(self._decoding.device)
        return runs and all(output.head.dtype != torch.float64 for output in self.outputs)

    def _hand_over_pixels(self) -> None:
        """Copy what workers decoded: without a fixed size the pictures are the result.

        The copy is needed because the worker fills the buffer again.
        """
        images = self.images
        ready = np.flatnonzero(images.decoded)
        pixels = images.pixels.to(self._decoding.device, non_blocking=True, copy=True)
        pictures = images.pictures(ready, pixels, images.regions.pixels)
        (output,) = self.outputs
        assert isinstance(output.out, list)
        for position, picture in zip(ready.tolist(), pictures, strict=True):
            output.out[position] = picture  # in the memory format that the worker gave it

    def _launches(self, plan: Plan, *, kept: bool) -> _Launched:
        """The launches of a plan; ``kept`` says whether their tables lie in the batch's buffer."""
        images = self.images
        starts = images.regions.tables
        tables = images.buffer.tensor[starts[0] : starts[-1]]
        if not kept:
            parts = [
                Launches.numbers(table, output.head.colors)
                for table, output in zip(plan.tables, self.outputs, strict=True)
            ]
            tables = torch.cat(parts)
            tables = tables.pin_memory() if images.buffer.is_pinned else tables
            starts = [0, *np.cumsum([len(part) for part in parts]).tolist()]
        views = []
        for output, table, start in zip(self.outputs, plan.tables, starts, strict=False):
            assert isinstance(output.out, torch.Tensor | Pieces)
            head = output.head
            launches = Launches(table, output.out, torch.uint8, head.interpolation, head.fill)
            views.append((launches, start - starts[0]))
        return _Launched(tables, views)

    def _run(self, part: Part, number: int) -> None:
        """Decode and resample a part: by the planned launch, else apart, and in pieces."""
        failure: _Failure | None = None
        if self._launched is not None:
            failure = self._attempt(partial(self._decode_and_launch, part, number))
            if failure is None:
                return
            if failure.reason is None:
                self._decoding.make_room()
        if part.upload is not None:
            self._insist(partial(self._sample_upload, part.upload))
        if part.call is None:
            return
        if failure is None:
            self._decode(part.call)
        else:
            self._decode_halves(part.call, failure)

    def _attempt(self, work: Callable[[], None]) -> _Failure | None:
        """Run it, and say why it failed. The exception is dropped: it holds what was allocated."""
        try:
            work()
        except torch.OutOfMemoryError:
            return _Failure(None)
        except RefusedError as error:
            return _Failure(str(error))
        return None

    def _insist(self, work: Callable[[], None]) -> None:
        """Run what no decoder refuses. Out of memory, make room and run it once more."""
        if self._attempt(work) is not None:
            self._decoding.make_room()
            work()

    def _decode(self, call: Call, *, again: bool = False) -> None:
        """Decode files whose pictures no launch of the plan reads, and resample them.

        ``again`` says that room was made for a file that did not fit into memory alone.
        """
        failure = self._attempt(partial(self._decode_apart, call))
        if failure is None:
            return
        if failure.reason is None:
            if again:
                raise self._too_large(int(call.positions[0]))
            self._decoding.make_room()
        self._decode_halves(call, failure)

    def _decode_halves(self, call: Call, failure: _Failure) -> None:
        """Decode the halves of a call that failed. A single file that was refused goes to the CPU.

        A file that only the GPU's decoder refuses is not a bad file.
        """
        if len(call.positions) == 1 and failure.reason is not None:
            position = int(call.positions[0])
            try:
                self._insist(partial(self._decode_on_cpu, position, failure.reason))
            except torch.OutOfMemoryError as error:
                raise self._too_large(position) from error
            return
        halves = [half for half in np.array_split(call.positions, 2) if len(half)]
        for half in halves:
            self._decode(self.images.call(half), again=len(halves) == 1)

    def _decode_and_launch(self, part: Part, number: int) -> None:
        """Decode into scratch, and launch: see Note [One call for a batch]."""
        launched = self._launched
        assert launched is not None
        decoder = None if part.call is None else self._decoder
        checked = decoder is not None and decoder.canaries  # see Note [Canaries]
        with Timed(self._stats, "resample" if decoder is None else "decode"):
            flat = self._decoding.memory(launched.pictures_at + part.size)
            self._copy_tables(number, flat, checked=checked)
            if decoder is not None:
                decoder.wait_for_readers()
            pictures = self._copy_pixels(part, flat)
            if part.call is not None and decoder is not None:
                self._call_decoder(part.call, pictures)
                self._learn(decoder)
        with Timed(self._stats, "resample"):
            self._launch(number, flat, checked=checked)

    def _copy_tables(self, number: int, flat: torch.Tensor, *, checked: bool) -> None:
        """Queue the copy of the launch tables, and the canaries of a part."""
        launched = self._launched
        assert launched is not None
        # Tables that are not in the batch's buffer are kept by torch until they are copied.
        flat[: len(launched.tables)].copy_(launched.tables, non_blocking=True)
        if checked:
            launches, start = launched.views[0]
            address = flat.data_ptr()
            launches.set_canaries(number, address + launched.pictures_at, address + start)

    def _copy_pixels(self, part: Part, flat: torch.Tensor) -> torch.Tensor:
        """Queue the copy of what workers decoded; where the pictures of the call are to lie."""
        assert self._launched is not None
        pictures = flat[self._launched.pictures_at :][: part.size]
        if part.upload is not None:
            pixels = self.images.buffer.tensor[part.upload.start : part.upload.stop]
            pictures[: part.uploaded].copy_(pixels, non_blocking=True)
        return pictures[part.uploaded :]

    @property
    def scratch(self) -> int:
        """Bytes of scratch for all pictures, if one call decodes and one launch reads them; or 0.

        The next job's scratch may begin after them.
        """
        if self._launched is None or len(self._parts) != 1 or self._parts[0].call is None:
            return 0
        size = self._launched.pictures_at + self._parts[0].size
        return -(-size // ALIGNED) * ALIGNED

    @staticmethod
    def decode_together(jobs: Sequence[ImageJob], decoding: Decoding) -> None:
        """Decode the files of some jobs in one call, and launch each: see Note [Together].

        Raises:
            RefusedError: if the decoder refuses one of the files.
            torch.OutOfMemoryError: if there is too little memory.
        """
        decoder = decoding.decoder
        assert decoder is not None
        checked = decoder.canaries
        with Timed(decoding.stats, "decode"):
            sizes = [job.scratch for job in jobs]
            flats = decoding.memory(sum(sizes))[: sum(sizes)].split(sizes)
            for job, flat in zip(jobs, flats, strict=True):
                job._copy_tables(0, flat, checked=checked)
            decoder.wait_for_readers()
            orders = []
            for job, flat in zip(jobs, flats, strict=True):
                (part,) = job._parts
                assert part.call is not None
                orders.append((part.call, job.images.buffer.tensor, job._copy_pixels(part, flat)))
            with refusals(sum(sizes), decoding.device):
                decoder.decode_together(orders)
            jobs[0]._learn(decoder)
        with Timed(decoding.stats, "resample"):
            for job, flat in zip(jobs, flats, strict=True):
                job._launch(0, flat, checked=checked)

    def _sample_upload(self, upload: Upload) -> None:
        """Copy what workers decoded, and resample it without the planned launch."""
        pixels = self.images.buffer.tensor[upload.start : upload.stop]
        copied = pixels.to(self._decoding.device, non_blocking=True)
        with Timed(self._stats, "resample"):
            for view, output in enumerate(self.outputs):
                pictures = self.images.pictures(upload.positions, copied, upload.start, view)
                _resample(self.images, output, upload.positions, pictures)

    def _learn(self, decoder: ImageDecoder) -> None:
        """Tell, after the first decode, if CUDA kernels decode."""
        if self._decoding.learn(decoder.streams):
            self._learned()

    def _call_decoder(self, call: Call, out: torch.Tensor) -> None:
        with refusals(call.size, self._decoding.device):
            self._decoder.decode(call, self.images.buffer.tensor, out)

    def _launch(self, number: int, flat: torch.Tensor, *, checked: bool = False) -> None:
        """Resample one part for all views; ``flat`` has the tables, and then the pictures."""
        launched = self._launched
        assert launched is not None
        flags = 0
        if checked:
            on_gpu = self._decoding.device.type == "cuda"
            flags = launched.flags(len(self.images), pinned=on_gpu)
        address = flat.data_ptr()
        for launches, start in launched.views:
            launches.launch(number, address + launched.pictures_at, address + start, survived=flags)
            flags = 0  # the launch of the first view writes them

    def check(self) -> None:
        """Decode once more what the engines have skipped, after all calls. See Note [Canaries]."""
        if self._launched is None or self._launched.survived is None:
            return
        with Timed(self._stats, "decode"):
            self._decoder.wait_for_readers()
        # A picture that a worker decoded may have that color.
        missed = np.flatnonzero(self._launched.survived.numpy() > self.images.decoded)
        self._decode_skipped(missed)

    def _decode_skipped(self, positions: Ints) -> None:
        """Decode each of some pictures alone, and on the CPU if it is skipped again."""
        if not len(positions):
            return
        self._stats.add("missed_images", len(positions))
        for position in positions.tolist():
            call = self.images.call(np.array([position]))
            try:
                reason = "it was skipped" if len(self._decode_call(call)) else ""
            except RefusedError as error:
                reason = str(error)
            if reason:
                self._decode_on_cpu(position, reason)

    def _decode_apart(self, call: Call) -> None:
        """Decode files whose pictures no launch of the plan reads."""
        self._decode_skipped(self._decode_call(call))

    def _decode_call(self, call: Call) -> Ints:
        """Decode files to new memory, and resample them; the positions of skipped pictures."""
        decoder = self._decoder
        with Timed(self._stats, "decode"):
            checked = decoder.canaries  # see Note [Canaries]
            if checked:
                color = _canary(self._decoding.device)
                flat = color.repeat(call.size // 3)
            else:
                flat = torch.empty(call.size, dtype=torch.uint8, device=self._decoding.device)
            decoder.wait_for_readers()
            self._call_decoder(call, flat)
            pictures = call.pictures(flat)
            skipped = np.zeros(len(pictures), dtype=bool)
            if checked:
                corners = torch.stack([picture[:, i, i] for picture in pictures for i in (0, -1)])
                skipped = (corners == color).all(1).view(-1, 2).any(1).cpu().numpy()
        with Timed(self._stats, "resample"):
            written = np.flatnonzero(~skipped)
            self._sample(call.positions[written], [pictures[i] for i in written.tolist()])
        return call.positions[skipped]

    def _decode_on_cpu(self, position: int, reason: str) -> None:
        """Decode a file that the GPU's decoder has refused, for this reason."""
        images = self.images
        height, width = images.call(np.array([position])).shapes[0].tolist()
        size = readable(3 * height * width)
        try:
            with memory_for(f"a picture of {size} decoded: {images.who.name(position)}"):
                picture = decode_cpu(images.span(position))
        except ValueError as error:
            images.errors[position] = str(error)
            return
        self._stats.fell_back(reason)
        on_device = picture.contiguous().to(self._decoding.device)
        self._sample(np.array([position]), [on_device])

    def _sample(self, positions: Ints, pictures: Sequence[torch.Tensor]) -> None:
        """Queue the fused transforms of some decoded pictures on the current stream."""
        if not len(positions):
            return
        for output in self.outputs:
            if output.rows is None:
                assert isinstance(output.out, list)
                for position, picture in zip(positions.tolist(), pictures, strict=True):
                    # A view would keep the memory of the whole call.
                    output.out[position] = picture.contiguous()
            else:
                _resample(self.images, output, positions, pictures)

    def _too_large(self, position: int) -> torch.OutOfMemoryError:
        device = self._decoding.device
        height, width = self.images.stored.sizes[position].tolist()
        size = readable(3 * height * width)
        reason = f"out of memory on {device}, also alone; its {width} x {height} pixels need {size}"
        if device.type == "cuda":
            free, total = map(readable, torch.cuda.mem_get_info(device))
            used = readable(torch.cuda.memory_allocated(device))
            reason += f", {free} of {total} are free, and torch has {used} in use"
        who = self.images.who
        bad = BadImage(int(who.indices[position]), who.paths[position], reason)
        return torch.OutOfMemoryError(f"{bad}. Take smaller batches, or leave it to the workers.")


def _canary(device: torch.device) -> torch.Tensor:
    """``(3,)`` uint8, the color of memory that no decoder has written to."""
    color = torch.tensor([*CANARY.to_bytes(3, "little")], dtype=torch.uint8)
    return color.to(device)


def _resample(
    images: PreparedImages, output: Output, positions: Ints, pictures: Sequence[torch.Tensor]
) -> None:
    """Carry out the fused transforms of one view on pictures as they are stored."""
    assert output.rows is not None
    assert isinstance(output.out, torch.Tensor | Pieces | list)
    turned = images.stored.transposed[positions].tolist()
    upright = [
        picture.mT if turn else picture for picture, turn in zip(pictures, turned, strict=True)
    ]
    output.head.resample_into(output.out, positions, upright, output.rows[positions])
