"""Loads the installed torchvision where its compiled operators do not fit the installed torch.

torchvision's wheels on PyPI are built for CUDA.  With a CPU build of torch they fail at import, because two
operators that no program here uses are not defined.  This module defines them, then imports the real package.
"""

import importlib
import sys
from pathlib import Path

import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_own_folder = str(Path(__file__).resolve().parents[1])
_folders = sys.path[:]
sys.path[:] = [folder for folder in _folders if folder != _own_folder]
del sys.modules[__name__]
try:
    _installed = importlib.import_module(__name__)
finally:
    sys.path[:] = _folders  # a spawned process gets it and needs this module as well
_installed._stepscope_operators = _operators  # they are undefined when the object goes
