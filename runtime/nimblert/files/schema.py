"""What the encoder and the decoder must know of schema/plan.fbs beside the generated code.

The structs are read and written many at a time, so their layouts stand here. The decoder does without
the generated code, whose import takes 20 ms of a process start; tests compare both.
"""

import enum
from struct import Struct

IDENTIFIER = b"NPLN"
"""Bytes 4 to 8 of the file, schema/plan.fbs: file_identifier."""

MAJOR = 2
"""The major version that is written. Version 1 is read, too, of which 2 is an extension; see schema/README.md."""
MINOR = 1
"""Fields of a newer minor version are ignored."""
OLDEST_MAJOR = 1
"""Plans of an older major version than this, or of a newer one than `MAJOR`, are refused."""


class Action(enum.IntEnum):
    """Members of the union Action, by the name of their table."""

    LAUNCH = 1
    MEMCPY = 2
    MEMSET = 3
    RECORD = 4
    WAIT = 5


SCHEMA_VERSION = Struct("<HH")
SEGMENT = Struct("<QQ")
POINTER = Struct("<qIB3x")
RELOCATION = Struct("<qIB3xI4x")
ACCESS = Struct("<qIB3xQ")
DIM3 = Struct("<III")
SAMPLE_RANGE = Struct("<qq")
COMPUTE_CAPABILITY = Struct("<HH")
