"""Answer from a plan with nimblert alone: no PyTorch, no ONNX package, no Triton.

Usage: ``python samples/serve_lean.py PLAN INPUT.npy``, for a plan with one input.
"""

import sys

import numpy as np

import nimblert

FRAMEWORKS = ("nimblec", "torch", "onnx", "triton")


def main(plan: str, file: str) -> None:
    """Run ``plan`` on the array in ``file`` and print every output."""
    with nimblert.load(plan) as executable:
        (image,) = executable.inputs
        outputs = executable.run({image.name: np.load(file)})
    for name, value in outputs.items():
        print(f"{name}: {np.array2string(value, precision=4, suppress_small=True)}")
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    assert not imported, f"the lean runtime imported {imported}"
    print("frameworks imported: none")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python samples/serve_lean.py PLAN INPUT.npy")
    main(*sys.argv[1:])
