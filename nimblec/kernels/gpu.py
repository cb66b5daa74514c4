"""Facts about a GPU: the one record that tilings, launches and timing depend on."""

from dataclasses import dataclass
from typing import Any, Literal, Self

Trigger = Literal["none", "late"]
"""When a launch lets the next one start: when it ends, or after its own wait."""

KIB = 1024
_WIDE = frozenset({9, 10})
"""Hopper and datacenter Blackwell multiply wide tiles by four warps, others by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Constants of `nimblec.kernels.products.gemm_tilings.estimate`, in bytes, operations or parts per microsecond.

    Fitted to 590 times of 50 shapes on an H200 (ResNet-50, MobileNetV2, BERT; batch 1, weights not in the L2
    cache). The fastest of the dozen tilings of a shape ranks third by the estimate on average, and is always
    among the 10 candidates. On other GPUs the estimate gives an order in which to try tilings, not times.
    """

    l2_bytes: float = 3.6e6
    block_bytes: float = 78.6e3
    block_bytes_stored: float = 24e3
    flops: float = 2.5e6
    """Per multiprocessor."""
    step: float = 0.0167
    step_per_64: float = 0.0439
    """Per 64 of block_k."""
    load: float = 0.06
    """Time that a step waits for its loads, divided by the stages."""
    behind: float = 0.384
    """The share of its time that a second block on a multiprocessor adds, as it fills the waits of the first."""
    narrow: float = 2.37
    """How much slower tiles of fewer than 64 rows are on GPUs whose wider tiles use instructions of warp groups."""
    split: float = 1.3
    sharpness: float = 3
    """The exponent of the smooth maximum of concurrent work, to which the lesser parts add a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """Facts about a CUDA device; sizes in bytes.

    Sources of those below: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability",
    and NVIDIA's architecture white papers.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    """The most shared memory that a block may opt in to: all of a multiprocessor's but 1 KiB."""
    l2: int
    speed: Speed = Speed()
    names: tuple[str, ...] = ()
    """GPUs like that, by the names that torch gives them."""

    @classmethod
    def current(cls) -> Self:
        """Return the current device of this thread."""
        import torch

        found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # torch's stubs lack a field
        capability = found.major, found.minor
        return cls(
            capability=capability,
            multiprocessors=found.multi_processor_count,
            shared_per_block=found.shared_memory_per_block_optin,
            l2=found.L2_cache_size,
            speed=_speed(capability),
        )

    @property
    def architecture(self) -> int:
        """As Triton and PTX number it: 90 for compute capability 9.0."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def has_programmatic_launch(self) -> bool:
        """Whether a kernel may start before its predecessor ends, and wait by itself; all kernels here need it."""
        return self.capability >= (9, 0)

    @property
    def has_wide_tensor_cores(self) -> bool:
        """Whether four warps multiply together: bfloat16 over six times as fast as other units multiply float32."""
        return self.capability[0] in _WIDE

    @property
    def trigger(self) -> Trigger:
        """How launches let the next one start."""
        return "late" if self.has_programmatic_launch else "none"


def _speed(capability: tuple[int, int]) -> Speed:
    """Return the speed of a GPU."""
    return Speed() if capability[0] in _WIDE else Speed(narrow=1)


def _gpu(capability: tuple[int, int], *names: str, multiprocessors: int, shared_kib: int, l2_mib: int) -> GPU:
    """Return the record of a GPU, with sizes in KiB and MiB."""
    return GPU(
        capability=capability,
        multiprocessors=multiprocessors,
        shared_per_block=shared_kib * KIB,
        l2=l2_mib * KIB * KIB,
        speed=_speed(capability),
        names=names,
    )


SM_80 = _gpu((8, 0), multiprocessors=108, shared_kib=163, l2_mib=40)
"""A100."""
SM_86 = _gpu((8, 6), multiprocessors=82, shared_kib=99, l2_mib=6)
"""GeForce RTX 3090; A10 and A40 are alike."""
SM_89 = _gpu((8, 9), multiprocessors=142, shared_kib=99, l2_mib=96)
"""L40S."""
SM_90 = _gpu((9, 0), "NVIDIA H200", "NVIDIA H100 80GB HBM3", multiprocessors=132, shared_kib=227, l2_mib=50)
"""H100 and H200, SXM."""
SM_100 = _gpu((10, 0), "NVIDIA B200", multiprocessors=148, shared_kib=227, l2_mib=126)
"""B200."""
SM_120 = _gpu((12, 0), "NVIDIA GeForce RTX 5090", multiprocessors=170, shared_kib=99, l2_mib=96)
"""GeForce RTX 5090."""
KNOWN = (SM_80, SM_86, SM_89, SM_90, SM_100, SM_120)
