from tests.policy.conftest import one_rank  # noqa: F401
