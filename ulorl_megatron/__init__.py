"""UloRL (arXiv 2507.19766) on Megatron-Core and SGLang."""

__version__ = "0.1.0"
