"""The sizes of cropped outputs: kernels of the graph copy them to page-locked memory."""

import numpy as np

from nimblert.calls.outputs import checked_sizes
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.memory import DeviceMemory, host_bytes
from nimblert.cuda.movers import GatherKernels
from nimblert.plan import Crop, Program
from nimblert.plan.dimensions import Shape
from nimblert.plan.pieces import SIZE_NBYTES


class Crops:
    """The crops of a program, each with page-locked memory for its sizes."""

    def __init__(self, program: Program, context: Context, kernels: GatherKernels) -> None:
        self._outputs, self._kernels = program.outputs, kernels
        self._places: dict[Crop, np.ndarray] = {}
        for crop in (command for _, command in program.work if isinstance(command, Crop)):
            nbytes = SIZE_NBYTES * crop.rank
            address = int(context.acquire(call("cuMemHostAlloc", nbytes, 0), "cuMemFreeHost"))
            self._places[crop] = host_bytes(address, nbytes).view(np.int64)
            self._places[crop][:] = program.outputs[crop.output].shape

    def add(self, built: Handle, crop: Crop, memory: DeviceMemory) -> Handle:
        """Add the copy of the sizes to a graph, without edges, and return its node."""
        place = self._places[crop]
        return self._kernels.add_copy(built, place.ctypes.data, memory.address(crop.sizes), place.nbytes)

    def sizes(self) -> dict[str, Shape]:
        """Return the sizes that the last run, which has ended, gave to the outputs, by name. Raises InputError."""
        outputs = ((self._outputs[crop.output], place) for crop, place in self._places.items())
        return {output.name: checked_sizes(output, place.tolist()) for output, place in outputs}
