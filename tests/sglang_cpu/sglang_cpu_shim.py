"""Lets torchvision, which SGLang imports for text models too, load beside the CPU build of torch."""

import sys
from importlib.abc import MetaPathFinder

DECLARED = []
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _DeclaresOperators(MetaPathFinder):
    """Declares the operators that torchvision expects of its compiled half, which needs CUDA, before it loads."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                library.define(operator)
            DECLARED.append(library)


sys.meta_path.insert(0, _DeclaresOperators())
