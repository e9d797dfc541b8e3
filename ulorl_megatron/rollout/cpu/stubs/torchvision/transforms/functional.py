"""Names that vision models import; see the package docstring."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]


def pil_to_tensor(*args, **kwargs):
    raise NotImplementedError("torchvision is not installed beside CPU torch: images cannot be converted")
