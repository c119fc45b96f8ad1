"""What stands in for a GPU on a machine without one, put in at one place."""


def decode_as_on_a_gpu(prefetcher, decoder, *, job=None, launches=True):
    """Let ``decoder`` have the photos of a prefetcher on the CPU.

    Args:
        prefetcher: on the CPU.
        decoder: an ``ImageDecoder``.
        job: the class that takes a batch through it.
        launches: whether kernels resample what it decoded, in Triton's interpreter.
    """
    stage = prefetcher._pipeline
    stage.decoder, stage.packer.on_gpu = decoder, True
    if launches:
        stage.packer.finishes = False
    if job is not None:
        stage.job = job
    return prefetcher
