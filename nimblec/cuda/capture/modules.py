"""Find the cubin of every kernel, and store each cubin once."""

import re
from collections import defaultdict
from functools import cached_property

from nimblec.base.errors import UnsupportedModelError
from nimblec.cuda.capture.cubin_cut import cut
from nimblec.cuda.capture.cubin_reading import entry_symbols
from nimblec.cuda.capture.cupti import CodeRecorder
from nimblec.cuda.capture.elf import UnfamiliarCubinError
from nimblec.cuda.capture.nodes import Function, kernels_of
from nimblert.errors import PlanFormatError

_ORIGINS = (
    ("triton", ("triton_",)),
    ("cudnn", ("cudnn", "conv2d_c1", "xmma", "implicit_convolve", "winograd")),
    ("cublas", ("nvjet", "cublas", "gemv", "gemmk1", "splitKreduce", "dot_kernel", "cutlass")),
    ("aten", ("at6native", "at_cuda", "2at4cuda")),
)

_CANNOT_BE_CUT = (UnfamiliarCubinError, PlanFormatError)
"""What `cut` raises for a cubin that must be used as it is; `entry_symbols` could read it."""

_REPORTING = re.compile(r"cudnn\d+bn_(?:fw_tr|bw)_1C11_singleread")


def reports_to_host(symbol: str) -> bool:
    """Return whether a kernel takes the address of a word of host memory, or null, for error reports.

    cuDNN's batch norms that read their input once store 0x3ef there if a sum overflows (cudnnQueryRuntimeError). Their
    code, in cuDNN 9.19 for sm_90a, compares the address with null before, and loads nothing from it.
    """
    return _REPORTING.search(symbol) is not None


class CodeIndex:
    """The cubins recorded so far, searchable by the kernels of this process."""

    def __init__(self, recorder: CodeRecorder) -> None:
        self._recorder = recorder
        self.kept_whole: list[str] = []

    @cached_property
    def _by_symbol(self) -> dict[str, list[bytes]]:
        found: defaultdict[str, list[bytes]] = defaultdict(list)
        for digest, image in self._recorder.images.items():
            for symbol in entry_symbols(memoryview(image)):
                found[symbol].append(digest)
        return found

    def digest(self, function: Function) -> bytes:
        """Return the SHA-256 of the cubin that holds ``function``.

        It follows from the module or library handle if a callback showed the pair: cuDNN's and Triton's
        kernels repeat names with different code. The fat binaries of the frameworks are found by the
        kernel's name; if several have it, by the names of their other kernels, or because the code is the same.
        Raises UnsupportedModelError if no image matches, or several with different code do.
        """
        known = self._recorder.of_library.get(function.library) or self._recorder.of_module.get(
            function.module
        )
        if known:
            return known
        matches = self._by_symbol.get(function.symbol, [])
        if len(matches) > 1:
            matches = self._told_apart(function, matches)
        if len(matches) != 1:
            raise UnsupportedModelError(
                f"kernel {function.symbol}: {len(matches)} loaded modules hold a kernel of this name, expected one"
            )
        return matches[0]

    def _told_apart(self, function: Function, matches: list[bytes]) -> list[bytes]:
        """Return the images that may hold ``function``, one for each different code of it."""
        names = kernels_of(function.module)
        images = {digest: self._recorder.images[digest] for digest in matches}
        likely = [d for d in matches if entry_symbols(memoryview(images[d])) == names] or matches
        found: dict[bytes, bytes] = {}
        for digest in likely:
            found.setdefault(cut_or_whole(images[digest], function.symbol), digest)
        return list(found.values())

    def shrunk(self, digest: bytes, symbols: list[str]) -> bytes:
        """Return the cubin with this digest, cut down to the kernels ``symbols``, without what only debuggers read.

        That names files of this machine, and is most of what Triton makes. A cubin with unfamiliar or damaged parts
        stays whole; ``kept_whole`` then gets the reason, if there are other kernels.
        """
        image = self._recorder.images[digest]
        try:
            return cut(image, symbols)
        except _CANNOT_BE_CUT as exc:
            if entry_symbols(memoryview(image)) != frozenset(symbols):
                self.kept_whole.append(f"{len(image)} bytes of code of {symbols[0]} could not be cut down: {exc}")
            return image


def cut_or_whole(image: bytes, symbol: str) -> bytes:
    """Return the code of one kernel: the cubin cut down to it, or whole if it cannot be cut."""
    try:
        return cut(image, [symbol])
    except _CANNOT_BE_CUT:
        return image


def origin(symbols: list[str]) -> str:
    """Return the library that kernels with these names come from: a label for readers."""
    for name, marks in _ORIGINS:
        if any(mark in symbol for symbol in symbols for mark in marks):
            return name
    return "other"
