"""Device memory that torch allocated before the captures of a model, and that was not moved for them."""

from collections.abc import Collection, Sequence

from nimblec.cuda.capture.allocator import Zone


class EarlierMemory:
    """The live allocations of earlier zones: ``addresses`` and ``sizes`` in order of first use.

    A plan cannot hold them, as nothing tells their contents. ``moved`` are the addresses of tensors that the captures
    were given or that the recorder keeps: a pointer that is equal in two captures does not point to these. ``others``
    are those of the weights and inputs of other models.
    """

    def __init__(
        self, zones: Sequence[Zone], moved: Collection[int] = frozenset(), others: Collection[int] = frozenset()
    ) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self._zones = tuple(zones)
        self._moved = moved
        self._others = others

    def reserves(self, address: int) -> bool:
        """Return whether an address belongs to torch's allocator, allocated or not."""
        return self._zone(address) is not None

    def find(self, address: int) -> int | None:
        """Return the allocation that holds ``address``."""
        zone = self._zone(address)
        index = None if zone is None else zone.find(address)
        if zone is None or index is None:
            return None
        begin = zone.addresses[index]
        if begin not in zone.live or begin in self._moved:
            return None
        if begin not in self.addresses:
            self.addresses.append(begin)
            self.sizes.append(zone.sizes[index])
        return self.addresses.index(begin)

    def is_anothers(self, index: int) -> bool:
        """Return whether an allocation is a weight or an input of another model."""
        return self.addresses[index] in self._others

    def _zone(self, address: int) -> Zone | None:
        return next((zone for zone in self._zones if zone.base <= address < zone.end), None)
