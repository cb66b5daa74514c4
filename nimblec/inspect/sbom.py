"""A plan as a software bill of materials: CycloneDX 1.5, as JSON."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, TypeAlias
from urllib.parse import quote
from uuid import NAMESPACE_OID, uuid5

from nimblert.plan import Module, Plan, Weight

Json: TypeAlias = dict[str, Any]

_NVIDIA = {"name": "NVIDIA CUDA Toolkit End User License Agreement"}
_CUDNN = {"name": "NVIDIA cuDNN Software License Agreement"}

_LIBRARIES = {
    "nimblec": {"id": "Apache-2.0"},
    "torch": {"id": "BSD-3-Clause"},
    "onnx": {"id": "Apache-2.0"},
    "onnxruntime": {"id": "MIT"},
    "cuda": _NVIDIA,
    "cudnn": _CUDNN,
}
"""The libraries among the versions that plans record, and their licences. Other versions are settings (level)."""

_ON_PYPI = ("torch", "onnx", "onnxruntime")

_ORIGINS = {"aten": {"id": "BSD-3-Clause"}, "cublas": _NVIDIA, "cudnn": _CUDNN}
"""The licences of kernels by origin. Those of generated kernels and of ONNX models depend on what they were made of."""


def bill_of_materials(plan: Plan, name: str) -> Json:
    """Return the bill of a plan file called ``name``: its modules, weights and state, and the libraries that made it.

    Equal files give equal bills: a bill holds no time, and its serial number follows from the file's digest.
    """
    digest = sha256(plan.stored()).hexdigest()
    components = [_module(index, module) for index, module in enumerate(plan.modules)]
    components += [_tensors(kind, held) for kind, held in (("weights", plan.weights), ("state", plan.state)) if held]
    components += [_library(*found) for found in plan.versions if found[0] in _LIBRARIES]
    settings = {"target": plan.target.name.lower(), "device": plan.device.name}
    settings |= {key: value for key, value in plan.versions if key not in _LIBRARIES}
    producer, _, version = plan.producer.partition(" ")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": uuid5(NAMESPACE_OID, digest).urn,
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": producer, "version": version}]},
            "component": {
                "type": "machine-learning-model",
                "bom-ref": "plan",
                "name": name,
                "hashes": _hashes(digest),
                "properties": _properties(settings),
            },
        },
        "components": components,
        "dependencies": [{"ref": "plan", "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _module(index: int, module: Module) -> Json:
    return {
        "type": "file",
        "bom-ref": f"modules[{index}]",
        "name": f"modules[{index}]",
        "hashes": _hashes(sha256(module.code).hexdigest()),
        "properties": _properties({"origin": module.origin, "nbytes": module.code.nbytes}),
        **_licences(_ORIGINS.get(module.origin)),
    }


def _tensors(kind: str, tensors: Sequence[Weight]) -> Json:
    """Return a component for all weights, or for the state, that holds one for each tensor.

    A stripped plan has the digests of each tensor alone.
    """
    whole = sha256()
    for tensor in tensors:
        whole.update(tensor.data)
    is_here = not any(tensor.sha256 for tensor in tensors)
    return {
        "type": "data",
        "bom-ref": kind,
        "name": kind,
        **({"hashes": _hashes(whole.hexdigest())} if is_here else {}),
        "components": [
            {
                "type": "data",
                "bom-ref": f"{kind}[{index}]",
                "name": tensor.name,
                "hashes": _hashes((tensor.sha256 or sha256(tensor.data).digest()).hex()),
                "properties": _properties({"dtype": tensor.dtype, "shape": "x".join(map(str, tensor.shape))}),
            }
            for index, tensor in enumerate(tensors)
        ],
    }


def _library(name: str, version: str) -> Json:
    package = {"purl": f"pkg:pypi/{name}@{quote(version)}"} if name in _ON_PYPI else {}
    return {
        "type": "library",
        "bom-ref": f"library {name}",
        "name": name,
        "version": version,
        **package,
        **_licences(_LIBRARIES[name]),
    }


def _hashes(digest: str) -> list[Json]:
    return [{"alg": "SHA-256", "content": digest}]


def _properties(values: Json) -> list[Json]:
    return [{"name": f"nimblec:{name}", "value": str(value)} for name, value in values.items()]


def _licences(known: Json | None) -> Json:
    return {"licenses": [{"license": known}]} if known else {}
