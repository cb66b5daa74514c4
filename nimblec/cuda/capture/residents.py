"""Find, copy and move the tensors that outlive a run: weights, inputs, state."""

import gc
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from nimblec.cuda.capture.allocator import BumpAllocator, Zone
from nimblec.cuda.capture.buffers import Allocation, Content
from nimblec.cuda.capture.capture import Capture
from nimblec.pytorch.model import uncompiled
from nimblec.pytorch.tensors import DTYPE_NAMES
from nimblert.cuda.driver import call


@dataclass(slots=True)
class Resident:
    """One storage on the device, with a copy of its contents before any run.

    ``bytes`` is a view of the storage as uint8, which follows it when it moves.
    """

    storage: torch.UntypedStorage
    bytes: torch.Tensor
    pristine: torch.Tensor
    name: str
    dtype: str
    shape: tuple[int, ...]
    is_input: bool
    mutated: bool = False

    def restore(self) -> None:
        """Restore the contents from before any run."""
        self.bytes.copy_(self.pristine)

    def move(self) -> None:
        """Allocate the storage again, with the contents from before any run."""
        nbytes = self.storage.nbytes()
        self.storage.resize_(0)
        self.storage.resize_(nbytes)
        self.restore()


def find_residents(
    root: object, inputs: Iterable[tuple[str, torch.Tensor]], known: Collection[int] = ()
) -> list[Resident]:
    """Return the non-empty storages of tensors on the device, sorted by address, except the ``known`` ones.

    Python's garbage collector knows all tensors, including those that a module keeps in plain
    attributes, or torch.compile in its own tables. Tensors of recordings are left out.
    """
    gc.collect()
    known = {*known, *kept_by_recordings()}
    views = {id(candidate.bytes) for candidate in gc.get_objects() if type(candidate) is Resident}
    names = _names(root)
    given = {t.untyped_storage().data_ptr(): name for name, t in inputs}
    tensors: dict[int, list[torch.Tensor]] = {}
    for tensor in _device_tensors():
        if id(tensor) in views:
            # A view of a storage as bytes, from another recording, describes nothing.
            continue
        tensors.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return [
        _resident(sharing, given.get(address) or names.get(address) or f"constant_{n}", is_input=address in given)
        for n, (address, sharing) in enumerate(sorted(tensors.items()), len(known))
        if address not in known
    ]


def _resident(sharing: list[torch.Tensor], name: str, *, is_input: bool) -> Resident:
    """Return the storage that these tensors share, described by one that spans it, or else as bytes."""
    storage = sharing[0].untyped_storage()
    spanning = [t for t in sharing if t.numel() * t.element_size() == storage.nbytes() and t.dtype in DTYPE_NAMES]
    described = max(spanning, key=lambda t: t.ndim, default=None)
    contents = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    return Resident(
        storage=storage,
        bytes=contents,
        pristine=contents.clone(),
        name=name,
        dtype="uint8" if described is None else DTYPE_NAMES[described.dtype],
        shape=(storage.nbytes(),) if described is None else tuple(described.shape),
        is_input=is_input,
    )


def kept_by_recordings() -> Iterator[int]:
    """Yield the addresses of the copies of residents, and of the results of captured runs."""
    for candidate in gc.get_objects():
        if type(candidate) is Resident:
            yield candidate.pristine.untyped_storage().data_ptr()
        elif type(candidate) is Capture:
            for leaf in tree_leaves(candidate.result):
                if isinstance(leaf, torch.Tensor):
                    yield leaf.untyped_storage().data_ptr()


def _device_tensors() -> list[torch.Tensor]:
    found = []
    for candidate in gc.get_objects():
        # type(), not isinstance(): proxies answer __class__ with code of their own, metaclasses ==.
        if type(candidate) is torch.Tensor or type(candidate) is torch.nn.Parameter:
            storage = candidate.untyped_storage() if candidate.layout is torch.strided else None
            if storage is not None and storage.device.type == "cuda" and storage.nbytes():
                found.append(candidate)
    return found


def storages() -> frozenset[int]:
    """Return the identities of the storages on the device, which survive a move."""
    return frozenset(tensor.untyped_storage()._cdata for tensor in _device_tensors())


def _names(root: object) -> dict[int, str]:
    # The names of torch.compile's wrapper begin otherwise.
    root = uncompiled(root)
    if not isinstance(root, torch.nn.Module):
        return {}
    named = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    names: dict[int, str] = {}
    for name, tensor in named:
        names.setdefault(tensor.untyped_storage().data_ptr(), name)
    return names


def only_in(others: Iterable[object], root: object) -> set[int]:
    """Return the addresses of the weights and buffers of ``others`` that the module ``root`` does not share."""
    return {address for other in others for address in _names(other)} - _names(root).keys()


def move_into(zone: Zone, residents: Iterable[Resident], allocator: BumpAllocator) -> None:
    """Move the residents into ``zone``: the n-th becomes its n-th allocation."""
    with allocator.allocating_in(zone):
        for resident in residents:
            resident.move()
    torch.cuda.synchronize()


def note_mutations(zone: Zone, residents: Iterable[Resident]) -> None:
    """Mark the residents whose contents in ``zone`` are no longer those from before any run."""
    for index, resident in enumerate(residents):
        now = torch.empty_like(resident.pristine)
        call("cuMemcpyDtoD", now.data_ptr(), zone.addresses[index], now.nbytes)
        resident.mutated = not torch.equal(now, resident.pristine)


def contents(
    residents: Iterable[Resident], state: Collection[int], scratch: Collection[int]
) -> dict[Allocation, Content]:
    """Return the contents of a zone's first allocations, after `move_into`.

    The storages ``state`` are state, the storages ``scratch`` scratch memory of kernels.
    """
    return {
        Allocation(index): Content(
            name=r.name,
            dtype=r.dtype,
            shape=r.shape,
            data=r.pristine.cpu().numpy().data,
            is_input=r.is_input,
            mutated=r.mutated,
            is_state=r.storage._cdata in state,
            is_scratch=r.storage._cdata in scratch,
            storage=r.storage._cdata,
        )
        for index, r in enumerate(residents)
    }
