"""The container recipes: one set of versions everywhere, and a check that says what is not there."""

import re
import runpy
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).parents[2]
CONTAINERS = PROJECT / "slurm" / "containers"
check = runpy.run_path(str(CONTAINERS / "check.py"))
pins = check["pins"]


def test_setup_and_the_cpu_requirements_name_the_same_versions():
    wanted = pins(CONTAINERS / "requirements.txt")
    extras = dict(re.findall(r'"([\w-]+)(?:\[[\w,-]+\])?==([\d.]+)"', (PROJECT / "setup.py").read_text()))
    assert len(wanted) == 6
    for name in ("megatron-core", "sglang", "transformer-engine", "flash-attn"):
        assert extras[name] == wanted[name]
    for file in ("engines.txt", "cpu.txt"):
        here = pins(PROJECT / "requirements" / file)
        for name in (here.keys() & wanted.keys()) - {"torch"}:  # a CPU build of torch need not be SGLang's
            assert here[name] == wanted[name]
    script = (CONTAINERS / "install.sh").read_text()
    for name in ("omegaconf", "tensorboard", "math-verify[antlr4_13_2]"):
        assert f"{name}=={metadata.version(name.partition('[')[0])}" in script


def test_versions_are_what_sglang_itself_asks_for():
    wanted = pins(CONTAINERS / "requirements.txt")
    asked = dict(re.findall(r"^([\w-]+)==([\d.]+)$", "\n".join(metadata.requires("sglang")), re.MULTILINE))
    assert metadata.version("sglang") == wanted["sglang"]
    assert {name: asked[name] for name in ("torch", "transformers")} == {
        name: wanted[name] for name in ("torch", "transformers")
    }


def test_both_recipes_start_from_the_same_image():
    recipes = [(CONTAINERS / name).read_text() for name in ("Dockerfile", "ulorl.def")]
    assert len({re.search(r"(?m)^F(?:ROM|rom:) (\S+)", recipe)[1] for recipe in recipes}) == 1


def test_the_check_says_what_is_wrong():
    fault = check["fault"]
    assert fault("transformers", metadata.version("transformers")) == ""
    assert fault("transformers", "1.0") == f"is {metadata.version('transformers')}, not 1.0"
    assert fault("transformer-engine", "2.18.0") == "is not installed"
    assert "does not give sgl_kernel: ModuleNotFoundError" in fault("sglang", metadata.version("sglang"))
    assert check["gpu_fault"]().startswith("torch sees none")
