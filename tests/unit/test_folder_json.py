"""JSON files of a checkpoint folder: within limits, and what they say about ending a generation."""

import json

import pytest

from longdraft.checkpoint.folder import generation_defaults, read_json
from longdraft.errors import ModelFileError


def test_read_json(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1, "a": 2}')
    assert read_json(file) == {"a": 2}
    with pytest.raises(ModelFileError, match="larger than 5 bytes"):
        read_json(file, 5)
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_json(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", '{"a": NaN}', '{"a": -Infinity}', "[1]", '"x"', "null", '{"a": ' * 99_999, "1" * 5000, "\xff"]
)
def test_read_json_refuses_what_is_no_object(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match="config.json"):
        read_json(file)


@pytest.mark.parametrize(
    ("generation", "model", "eos", "defaults"),
    [
        (None, None, (), {}),
        (None, {"eos_token_id": 2}, (2,), {}),
        ({"eos_token_id": [5, 6, 5]}, {"eos_token_id": 2}, (5, 6), {}),
        ({"eos_token_id": None, "temperature": 0.6}, {"eos_token_id": [2, 3]}, (2, 3), {"temperature": 0.6}),
        (
            {"eos_token_id": 0, "do_sample": False, "top_p": None, "_from_model_config": True, "use_cache": True},
            None,
            (0,),
            {"do_sample": False},
        ),
    ],
)
def test_generation_defaults(tmp_path, generation, model, eos, defaults):
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert generation_defaults(tmp_path) == (eos, defaults)


@pytest.mark.parametrize("eos", [-1, True, 1.0, "2", [1, None], {}, 2**31])
def test_ids_that_are_none_are_refused(tmp_path, eos):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelFileError, match="eos_token_id"):
        generation_defaults(tmp_path)
