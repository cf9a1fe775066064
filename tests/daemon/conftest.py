"""A tiny packed model that the tests of the daemon's processes share; made once per run."""

import pytest

from testkit.models import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A glm4_moe as int4 and int8 over two stripes, with room for long prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("glm4_moe", folder, precision="", weights=(2, 1), max_position_embeddings=8192)
