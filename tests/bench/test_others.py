"""The table of peers other than torch.compile, from made-up figures."""

from typing import Any

from bench import others, peers


def spread(median: float) -> dict[str, float]:
    return {"p5": median, "median": median, "p95": median}


def clocks(kernels: float, call: float, numpy: float) -> dict[str, Any]:
    return {"kernels_us": spread(kernels), "call_us": spread(call), "numpy_us": spread(numpy), "commit": "abc"}


def test_a_peer_stands_beside_our_times_and_what_does_not_run_says_why() -> None:
    ours = {"models": {others.RESNET: {"-O2": {**clocks(200, 1, 400), "replay_us": spread(210)}}}}
    found = {
        "environment": {"gpu": "a GPU", "cpu": "x"},
        "models": {
            others.RESNET: {
                "AOTInductor": {**clocks(400, 630, 800), "error": 0.001},
                "IREE": {"failed": "no sm_90", "commit": "abc"},
            }
        },
    }
    lines = others.markdown(found, ours).splitlines()
    cells = {line.split("|")[2].strip(): line for line in lines if "resnet50" in line}
    assert "400 / 200 (2.00) | 630 / 210 (3.00) | 800 / 400 (2.00) | 1.0e-03" in cells["AOTInductor"]
    assert "does not run: no sm_90" in cells["IREE"]
    assert "does not run: not tried" in cells["JAX"]
    assert lines[-1] == "Commit abc; a GPU."


def test_every_tuned_network_has_a_package_of_aotinductor() -> None:
    jobs = [job for jobs in others.table().jobs for job in jobs]
    assert {job.model for job in jobs if job.mode == "AOTInductor"} == set(peers.TUNED)
    assert {job.mode for job in jobs} == {"AOTInductor", "ONNX Runtime CUDA", "JAX", "JAX, cuDNN attention", "IREE"}
    assert all(job.command[-1] == "--turns" for job in jobs)
