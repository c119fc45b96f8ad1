"""The self-check gives each order its verdict, and is itself caught when nothing protects."""

import json
import subprocess
import sys

import pytest
import torch

import gpuprefetch
from gpuprefetch.__main__ import main
from gpuprefetch.insight.selfcheck import Check, SelfcheckReport, selfcheck

OURS = Check("nvjpeg", "library", rounds=100, reused=99)
CAUGHT = Check("torchvision", "unsafe", rounds=20, reused=19, corrupted=18)


@pytest.mark.parametrize(
    ("checks", "ok", "verdict"),
    [
        ([OURS, CAUGHT], True, "safe"),
        ([Check("nvjpeg", "library", 100, 99, 1), CAUGHT], False, "CORRUPTED"),
        ([Check("nvjpeg", "library", 100, 0, 0), CAUGHT], False, "no memory was reused"),
        ([Check("nvjpeg", "library", error="no CUDA build"), CAUGHT], False, "no CUDA build"),
        ([OURS, Check("nvjpeg", "unsafe", 20, 19, 0)], False, "waits for the stream itself"),
        ([OURS], False, "safe"),
        ([Check("handoff", "library", 100, 99), CAUGHT], False, "safe"),
    ],
)
def test_report(checks, ok, verdict):
    report = SelfcheckReport("a GPU", {"torch": "2"}, checks)
    assert report.ok is ok
    assert verdict in str(report)
    assert ("FAILED" in str(report)) is not ok


def test_report_tells_what_was_skipped_and_is_written_as_json(capsys, monkeypatch):
    report = SelfcheckReport(
        "a GPU", {"torch": "2"}, [OURS, CAUGHT], 3, driver="580.1", decode="nvJPEG's 7 JPEG engines"
    )
    assert "3 pictures skipped" in str(report) == repr(report)
    assert "NVIDIA driver 580.1, decode by nvJPEG's 7 JPEG engines" in str(report)
    monkeypatch.setattr(gpuprefetch, "selfcheck", lambda device, rounds: report)
    assert main(["selfcheck", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["metadata"]["gpu"], document["missed"]) == ("a GPU", 3)
    assert document["metadata"]["driver"] == "580.1"
    assert document["metadata"]["decode"] == "nvJPEG's 7 JPEG engines"
    assert [result["verdict"] for result in document["results"]] == ["safe", "caught"]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selfcheck"]) == 2
    assert "needs a CUDA device, got 'cpu', and torch sees" in capsys.readouterr().err
    with pytest.raises(ValueError, match="needs a CUDA device"):
        selfcheck()


@pytest.mark.parametrize("arguments", [["nothing"], ["selfcheck", "--rounds", "many"]])
def test_wrong_commands(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m gpuprefetch" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rounds": 3}, "rounds must be at least 20"),
        ({"device": "cpu"}, "needs a CUDA device"),
        ({"device": "cuda:99"}, "is not there: torch sees"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        selfcheck(**arguments)


# In new processes: where earlier tests had made decoders, nothing unsafe was caught, however long
# the sleeps. It may be that each decoder's streams share the GPU's queues, and keep their order.


@pytest.mark.alone
@pytest.mark.gpu
def test_the_librarys_order_is_safe():
    command = [sys.executable, "-m", "gpuprefetch", "selfcheck", "--rounds", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    for line in printed.splitlines():
        if " library " in line:
            assert line.endswith("safe"), printed
        # The decoders leave all waiting to us.
        if line.startswith(("nvjpeg       unsafe", "handoff      unsafe")):
            assert line.endswith("caught"), printed
    assert "0 pictures skipped" in printed
    assert "nvjpeg       library" in printed
    assert "torchvision  library" in printed


UNPROTECTED = """
from gpuprefetch.images.decode import DECODERS, NvjpegDecoder
from gpuprefetch.insight import selfcheck as _selfcheck

class Careless(NvjpegDecoder):
    def wait_for_readers(self):
        pass

DECODERS["nvjpeg"] = Careless
# Other programs may be on the GPU, and then a decode takes longer than a sleep of 5 ms.
_selfcheck.SLEEP_CYCLES *= 20
_selfcheck.UNSAFE_ROUNDS = 2  # they are tried elsewhere
report = _selfcheck.selfcheck(rounds=40)
(ours,) = (c for c in report.checks if (c.backend, c.order) == ("nvjpeg", "library"))
print(report)
print(ours.verdict, report.ok)
"""


@pytest.mark.alone
@pytest.mark.gpu
def test_unprotected_decoding_is_noticed():
    # Guards the test above: without what protects the decoded images it fails.
    done = subprocess.run(
        [sys.executable, "-c", UNPROTECTED], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "CORRUPTED False", done.stdout
