"""The embedded model's text tools, ours and those of transformers, which take seconds to make."""

import gguf
import pytest

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_gguf import build_tokenizer


@pytest.fixture(scope="session")
def metadata(embedded_path) -> dict:
    return {key: field.contents() for key, field in gguf.GGUFReader(embedded_path).fields.items()}


@pytest.fixture(scope="session")
def ours(metadata) -> Tokenizer:
    return build_tokenizer(metadata)


@pytest.fixture(scope="session")
def theirs(embedded_path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(embedded_path.parent, gguf_file=embedded_path.name)
