"""nimblert: run a plan without the framework that made it.

>>> import nimblert
>>> with nimblert.load("model.plan") as model:
...     y = model(x)
"""

from nimblert.arena import Arena
from nimblert.arrays.device_arrays import DeviceOutput
from nimblert.context import Context
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
from nimblert.executable import Executable, ExecutablePool, load, load_pool
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
