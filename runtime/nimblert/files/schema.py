"""Constants and struct layouts of schema/plan.fbs, for encoder and decoder.

Structs are read and written many at a time. The decoder does not import the generated code, which would take 20 ms of a
process start; tests compare both.
"""

import enum
from struct import Struct

IDENTIFIER = b"NPLN"
"""Bytes 4 to 8 of the file, schema/plan.fbs: file_identifier."""

MAJOR = 2
"""The major version that is written. Version 1, which 2 extends, is read too; see schema/README.md."""
MINOR = 1
"""The minor version that is written; fields of newer ones are ignored."""
OLDEST_MAJOR = 1
"""The oldest major version that is read."""


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
