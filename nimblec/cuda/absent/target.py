"""GPUs that a plan can be made for without them, by name."""

from nimblec.base.errors import CompileError
from nimblec.kernels.gpu import GPU, KNOWN


def find_gpu(name: str) -> GPU:
    """Return the record of a GPU by its architecture's name, such as "sm_90". Raises CompileError for another."""
    known = {f"sm_{gpu.architecture}": gpu for gpu in KNOWN}
    if name not in known:
        raise CompileError(f"--target {name}: is not known here: give one of {', '.join(known)}, cuda or cpu")
    return known[name]
