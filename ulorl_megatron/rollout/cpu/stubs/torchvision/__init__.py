"""Stand-in for torchvision where torch is a CPU build (PyPI's torchvision links against CUDA's torch).

SGLang and transformers import names from it at start for their vision models; a text model never calls one.
"""

__version__ = "0.0.0"
