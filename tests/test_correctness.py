"""The table of docs/correctness.md says what the committed JSON says."""

import pytest

VERSIONS = {"torch": "2.11.0", "torchcodec": "0.17.0"}


pytestmark = pytest.mark.usefixtures("scripts")


def document(benchmark, *results):
    metadata = {"gpu": "GPU", "versions": VERSIONS}
    return {"benchmark": benchmark, "file": "a.json", "metadata": metadata, "results": results}


def test_the_page_is_fresh():
    import correctness

    correctness.main(["--check"])


def test_rows():
    import correctness

    check = {"backend": "torchvision", "order": "unsafe", "rounds": 80, "corrupted": 79}
    broken = {"backend": "torchcodec", "order": "library", "verdict": "not checked: no CUDA"}
    integrity = {"what": "integrity", "batches": 20000, "tensors": 30000, "wrong_tensors": 1}
    memory = {"what": "memory", "epochs": 50, "warm_epochs": 10, "spread": {"threads": 0.0}}
    ranks = {"check": "images", "processes": 2, "ok": True, "different": 0, "compared": 76}
    counts = {"good_wrong": 0, "good_batches": 60, "same": 7, "differs": 2}
    fuzz = {"device": "cuda", "cases": 900, "crashes": [1], "counts": counts}
    block = correctness.block(
        [
            document("train"),
            document("soak", integrity, memory),
            document("fuzz", fuzz),
            document("distributed", ranks | {"mistakes": {"another epoch": "noticed"}}),
            document(
                "selfcheck", check | {"error": "", "verdict": "caught"}, broken | {"error": "x"}
            ),
        ]
    )
    assert (
        "| self-check, torchvision, unsafe order | 79 of 80 batches corrupted (caught) |" in block
    )
    assert "| not checked: no CUDA |" in block
    assert "| 1 mismatches | GPU; torch 2.11.0, TorchCodec 0.17.0 |" in block
    assert "spread over 40 epochs after 10 | threads 0.00% |" in block
    assert "| exact; 0 of 76 pictures different; another epoch: noticed |" in block
    assert "1 crashes or hangs; 0 of 60 good batches wrong" in block
    assert "read by both 9, of them with other pixels 2" in block
    assert correctness.block([document("train")]) == ""
