"""The measuring process of XLA, on the CPU, and its reading of traces of JAX's profiler."""

import json
from importlib.util import find_spec

import pytest
from subprocesses import python

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax: not installed")

TRACE = """
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 5000000 } } }
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "loop_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
  event_metadata { key: 3 value { id: 3 name: "module" } }
  lines {
    name: "Stream #13(Compute,MemcpyD2D)"
    timestamp_ns: 2000
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 3000000 }
    events { metadata_id: 2 offset_ps: 4000000 duration_ps: 1000000 }
  }
  lines { name: "XLA Modules" timestamp_ns: 2000 events { metadata_id: 3 offset_ps: 0 duration_ps: 9000000 } }
}
"""


def test_kernel_spans_skip_copies() -> None:
    from jax.profiler import ProfileData

    from bench.jax_peer import kernel_spans

    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(TRACE))
    assert list(kernel_spans(profile)) == [(3.0, 6.0)]


NETWORK = """
import numpy as np
import sys
import types

def network():
    weight = np.full((3, 4), 0.5, np.float16)
    return (lambda weights, x: (x @ weights["w"], x.sum())), ({"w": weight}, np.ones((2, 3), np.float16))

sys.modules["networks"] = types.ModuleType("networks")
sys.modules["networks"].network = network
sys.argv[1:] = ["networks:network"]
from bench.jax_peer import main
main()
"""


def test_jax_peer_measures_a_network_on_the_cpu() -> None:
    found = json.loads(python(NETWORK))
    assert found["error"] == 0.0
    assert found["backend"] == "cpu"
    assert 0 < found["call_us"]["p5"] <= found["call_us"]["median"] <= found["call_us"]["p95"]
    assert {"back_to_back_us", "numpy_us", "prepare_s", "noisy"} <= found.keys()
    assert {"commit", "jax"} <= found["environment"].keys()
