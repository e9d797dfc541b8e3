"""Names that vision models import; see the package docstring."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
