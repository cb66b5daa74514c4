"""The plan: its records, the file that holds them, and the reader of that file."""

from nimblert.plan.commands import (
    Access,
    Command,
    Dim3,
    Launch,
    Memcpy,
    Memset,
    Pointer,
    Record,
    Region,
    Relocation,
    Wait,
    Work,
)
from nimblert.plan.records import (
    ITEM_NBYTES,
    Candidate,
    Device,
    Fit,
    Golden,
    GoldenOutput,
    Kernel,
    Module,
    Op,
    Parameter,
    ParameterKind,
    Plan,
    Profile,
    Program,
    Role,
    ScheduleRecord,
    Target,
    Tensor,
    Weight,
    listed,
)

__all__ = [
    "ITEM_NBYTES", "Access", "Candidate", "Command", "Device", "Dim3", "Fit", "Golden", "GoldenOutput", "Kernel",
    "Launch", "Memcpy", "Memset", "Module", "Op", "Parameter", "ParameterKind", "Plan", "Pointer", "Profile",
    "Program", "Record", "Region", "Relocation", "Role", "ScheduleRecord", "Target", "Tensor", "Wait", "Weight",
    "Work", "listed",
]  # fmt: skip
