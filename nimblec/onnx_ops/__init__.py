"""The ONNX operators by family: one function on tensors for each range of opsets.

Importing this package fills the table of `nimblec.onnx_ops.table`.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
