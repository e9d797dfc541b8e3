"""The cluster of these tests. Without Slurm they are skipped, but on CI they fail."""

import os
import shutil

import pytest

from tests.cluster.slurm_cluster import PATH, PROGRAMS, Cluster


@pytest.fixture(scope="session")
def cluster():
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        message = f"Slurm is not installed: no {', '.join(missing)} (.ci/run shows how)"
        (pytest.fail if "CI" in os.environ else pytest.skip)(message)
    with Cluster(nodes=8) as cluster:
        yield cluster
