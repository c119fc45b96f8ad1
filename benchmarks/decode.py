"""What bounds the GPU's JPEG decoder, bytes or pixels: the same photos at some qualities and sizes.

    python benchmarks/decode.py --data PHOTOS --output benchmarks/results/decode-h100.json

The photos are resaved by Pillow, 4:2:0 and baseline. One call decodes 256 files from pinned memory,
on the JPEG engines, and in CUDA kernels as on a GPU without engines. Nothing else runs on the GPU.
"""

import argparse
import io
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import clock
import harness
import loaders
import numpy as np
import photos
import torch
from PIL import Image

# Quality, and pixels of the shorter side; None leaves either as it is.
KINDS = [(None, None), (75, None), (85, None), (95, None), (75, 256), (85, 256), (95, 256)]
ENGINES = ["auto", "none"]


def resaved(path: str, quality: int | None, shortest: int | None) -> bytes:
    """A photo as another JPEG; one that is smaller already keeps its size."""
    if quality is None:
        return Path(path).read_bytes()
    picture = Image.open(path).convert("RGB")
    least = min(picture.size)
    if shortest is not None and least > shortest:
        size = [round(side * shortest / least) for side in picture.size]
        picture = picture.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


def call_of(files: list[bytes]) -> tuple[Any, torch.Tensor]:
    """A decode call of some files, and the buffer that has them."""
    from gpuprefetch.images.prepared import Call

    shapes = [Image.open(io.BytesIO(file)).size[::-1] for file in files]
    # The largest first, as the loader has them.
    order = sorted(range(len(files)), key=lambda i: -shapes[i][0] * shapes[i][1])
    ends = np.cumsum([len(files[i]) for i in order])
    starts = np.concatenate([[0], ends[:-1]])
    spans = np.stack([starts, ends], axis=1)
    buffer = torch.frombuffer(bytearray(b"".join(files[i] for i in order)), dtype=torch.uint8)
    return Call(np.array(order), spans, np.array([shapes[i] for i in order])), buffer


def prepared(
    pool: ProcessPoolExecutor,
    paths: list[str],
    count: int,
    quality: int | None,
    shortest: int | None,
) -> tuple[Any, torch.Tensor]:
    """The call for ``count`` photos of one kind, and its buffer."""
    files = list(pool.map(partial(resaved, quality=quality, shortest=shortest), paths))
    return call_of([files[i % len(files)] for i in range(count)])


def measure(
    paths: list[str], count: int, engine: str, device: str, calls: int, kinds: list[list[Any]]
) -> dict[str, Any]:
    """Each kind of file, decoded in one way, in this process."""
    from gpuprefetch.images.decode import NvjpegDecoder
    from gpuprefetch.images.header import decode_cpu

    with ProcessPoolExecutor(loaders.cores()) as pool:
        orders = [prepared(pool, paths, count, *kind) for kind in kinds]
    if engine == "none":
        loaders.refuse_engines()
    decoder = NvjpegDecoder(torch.device("cuda", 0)) if device == "cuda" else None
    engines = engines_of(torch.device("cuda", 0)) if device == "cuda" else None
    rows = []
    for call, buffer in orders:
        out = torch.empty(call.size, dtype=torch.uint8, device=device)
        files = buffer.pin_memory() if device == "cuda" else buffer

        def run(call: Any = call, files: torch.Tensor = files, out: torch.Tensor = out) -> None:
            if decoder is not None:
                decoder.wait_for_readers()
                decoder.decode(call, files, out)
                return
            for file, picture in zip(call.files(files), call.pictures(out), strict=True):
                picture.copy_(decode_cpu(file))

        milliseconds = clock.time_loop(run, device, calls=calls)["loop_ms"]
        pixels = int(call.shapes.prod(axis=1).sum())
        rows.append(
            {
                "images_per_second": count / milliseconds * 1e3,
                "bytes_per_photo": len(buffer) / count,
                "megapixels_per_photo": pixels / count / 1e6,
                "gigabytes_per_second": len(buffer) / milliseconds / 1e6,
                "gigapixels_per_second": pixels / milliseconds / 1e6,
            }
        )
    return {"rows": rows, "engines": engines}


def engines_of(device: torch.device) -> int | None:
    """JPEG engines that decode in this process: 0 for CUDA kernels, None if nvJPEG does not say."""
    from gpuprefetch.images import nvjpeg

    if not nvjpeg.has_engines(device):
        return 0
    with nvjpeg.lease(device) as decoder:
        return decoder.engines() or None


def main(words: list[str] | None = None) -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--calls", type=int, default=40, help="in a measurement")
    parser.add_argument("--rounds", type=int, default=2, help="each the other way round")
    tiny = {"rounds": 1, "calls": 1, "batch_size": 2}
    args: argparse.Namespace = harness.parse_arguments(parser, words, **tiny)
    device = harness.Device()
    document = harness.Document("decode", args, device, anew=True)
    paths = [os.fspath(path) for path in photos.found(args.data)][: args.batch_size]
    ways = ENGINES if args.device == "cuda" else ["cpu"]
    kinds = [list(kind) for kind in KINDS]
    for number in range(args.rounds):
        step = 1 if number % 2 == 0 else -1
        for engine in ways[::step]:
            task = {"paths": paths, "count": args.batch_size, "calls": args.calls}
            task |= {"engine": engine, "device": args.device, "kinds": kinds[::step]}
            found = harness.run_child(__file__, task, device=device, timeout=args.timeout)
            same = {"engine": engine, "round": number, "batch_size": args.batch_size}
            if "error" in found:
                document.add(same | found)
                continue
            kept = ("engines", "gpu_peak_gib", "gpu_state")
            state = {key: found[key] for key in kept if key in found}
            for (quality, shortest), row in zip(kinds[::step], found["rows"], strict=True):
                document.add({"quality": quality, "shortest": shortest} | same | row | state)


if __name__ == "__main__":
    harness.child_main(measure)
    main()
