"""nimblert: run a plan without the framework that made it.

>>> import nimblert
>>> with nimblert.load("model.plan") as model:
...     y = model(x)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nimblert.errors import (
    CudaError,
    DeviceMismatchError,
    InputError,
    NimbleError,
    PlanError,
    PlanFormatError,
    PlanInvalidError,
    PlanSignatureError,
)
from nimblert.loading import load, load_pool

if TYPE_CHECKING:
    from nimblert.arena import Arena
    from nimblert.arrays.device_arrays import DeviceOutput
    from nimblert.context import Context
    from nimblert.executable import Executable, ExecutablePool
    from nimblert.plan import Plan
    from nimblert.plan.records import Limits
    from nimblert.telemetry import CommandTime, ObservedCall, observe

__version__ = "0.1.0"

__all__ = [
    "Arena",
    "CommandTime",
    "Context",
    "CudaError",
    "DeviceMismatchError",
    "DeviceOutput",
    "Executable",
    "ExecutablePool",
    "InputError",
    "Limits",
    "NimbleError",
    "ObservedCall",
    "Plan",
    "PlanError",
    "PlanFormatError",
    "PlanInvalidError",
    "PlanSignatureError",
    "load",
    "load_pool",
    "observe",
]

_LATE = {
    "Arena": "arena",
    "CommandTime": "telemetry",
    "Context": "context",
    "DeviceOutput": "arrays.device_arrays",
    "Executable": "executable",
    "ExecutablePool": "executable",
    "Limits": "plan.records",
    "ObservedCall": "telemetry",
    "Plan": "plan",
    "observe": "telemetry",
}
"""The modules of names that are imported on first use: `load` starts a GPU before it imports them, and numpy."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'nimblert' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"nimblert.{_LATE[name]}"), name)
    return found
