"""Devices the tests run on, and JPEG files drawn for them."""

import os

import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read by @triton.jit when a kernel module is imported, so it is set before gpuprefetch is.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest


def pytest_configure():
    # On a GPU runner a missing device must fail the run, not skip its way to green.
    if os.environ.get("GPUPREFETCH_REQUIRE_CUDA") and not HAS_CUDA:
        raise pytest.UsageError("GPUPREFETCH_REQUIRE_CUDA is set but no CUDA device is visible")


def pytest_collection_modifyitems(items):
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def kernel_device():
    """Where Triton kernels run here: compiled on CUDA, interpreted on CPU."""
    return torch.device("cuda" if HAS_CUDA else "cpu")
