"""Loads the installed torchvision where its compiled operators do not fit the installed torch.

torchvision's wheels on PyPI are built for CUDA.  With a CPU build of torch they fail at import, because an operator
that no program here uses is not defined.  This module defines it, steps aside and imports the real package.
"""

import importlib
import sys
from pathlib import Path

import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_own_folder = str(Path(__file__).resolve().parents[1])
sys.path[:] = [folder for folder in sys.path if folder != _own_folder]
del sys.modules[__name__]
_installed = importlib.import_module(__name__)
_installed._stepscope_operators = _operators  # they are undefined when the object goes
