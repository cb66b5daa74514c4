"""Run a command without address space randomisation: ``python fixed_addresses.py PROGRAM ARGUMENT...``.

Kernel parameters contain padding with what was on the host's stack, addresses among it. Where these are fixed, fewer
bytes differ from one compilation to the next; those of the heap may still. It is a script, so that the process imports
nothing twice. If the system refuses, the command runs anyway.
"""

import ctypes
import os
import sys

_ASK = 0xFFFFFFFF
_ADDR_NO_RANDOMIZE = 0x0040000

if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    libc.personality(libc.personality(_ASK) | _ADDR_NO_RANDOMIZE)
    os.execv(sys.argv[1], sys.argv[1:])
