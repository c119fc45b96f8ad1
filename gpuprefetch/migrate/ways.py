"""What to write in place of a dataset that cannot move: the words of refusals."""

from __future__ import annotations

from gpuprefetch.lists.views import ENCODED
from gpuprefetch.migrate.taken import BY_HAND

AS_IT_IS = (
    "The loader may also stay as it is: DataPrefetcher(loader) moves the batches that its workers "
    "make ahead of the loop."
)
TWO_WAYS = (
    "Two ways work. Let a folder apply the transform, and a Subset choose the samples: "
    "Subset(ImageFolder(root, transform), indices). Or let __getitem__ return "
    f"{ENCODED} and apply no transform, and write {BY_HAND}"
)
OF_TENSORS = (
    "This transform takes tensors: there it is to begin with v2.ToImage(), v2.Compose([v2.ToImage()"
    ", transform]), and the folder needs loader=decode_image."
)
SEEDED = (
    "On the device each image is sampled anew. Those that __getitem__ returns as "
    f"{ENCODED}, without any transform, have the same random parameters as the other images of "
    f"their sample, and a tv_tensors.Mask beside one follows it: {BY_HAND} {AS_IT_IS}"
)
IN_WORKERS = "let the workers decode and call it: accelerate(loader, keep_unknown=True)."
NO_PICTURE = (
    "It takes PIL images, and tensors (3, H, W) of uint8 on the CPU. If it begins with "
    "ToPILImage(), it takes what that takes, and if it begins with ToTensor() or ToImage(), arrays "
    f"(H, W, 3) of uint8. Or let __getitem__ return {ENCODED}, apply no transform, and write "
    f"{BY_HAND} The same line takes tensors (C, H, W) that are all of one size."
)
IN_THREAD = (
    "calls its transform in a thread that it has started. Let that thread read the picture only, "
    "and call the transform where __getitem__ is called."
)
OF_THREADS = (
    "gave what __getitem__ has made in threads that the dataset has started. Let it ask for its "
    "samples where it is called: [self[index] for index in indices]. It only reads files here: "
    "the prefetcher decodes them, and more workers read more of them at a time."
)
KEPT = (
    "gave an image that it keeps from one call to the next, or has encoded itself. Here images are "
    "not transformed yet, and its own samples would not be either. Let it keep the "
    "bytes of files, and call its transform each time."
)
