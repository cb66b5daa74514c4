"""What the encoder and the decoder must know of schema/plan.fbs beside the generated code.

The structs are read and written many at a time, so their layouts stand here; tests compare them
with the generated accessors.
"""

from struct import Struct

IDENTIFIER = b"NPLN"
"""Bytes 4 to 8 of the file, schema/plan.fbs: file_identifier."""

MAJOR = 1
"""Plans of another major version are refused; see schema/README.md."""
MINOR = 0
"""Fields of a newer minor version are ignored."""

SCHEMA_VERSION = Struct("<HH")
SEGMENT = Struct("<QQ")
POINTER = Struct("<qIB3x")
RELOCATION = Struct("<qIB3xI4x")
ACCESS = Struct("<qIB3xQ")
DIM3 = Struct("<III")
SAMPLE_RANGE = Struct("<qq")
COMPUTE_CAPABILITY = Struct("<HH")
