"""Names that transformers imports for images; see the package's docstring."""

from enum import Enum


class ImageReadMode(Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def decode_image(*args, **kwargs):
    raise NotImplementedError("torchvision is not installed beside CPU torch: images cannot be decoded")


decode_jpeg = decode_image
