"""What a profiling session sends to generative families, and which it refuses."""

import json
from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2

from tests.support.engine_family import write_family
from trefoil.core.errors import CatalogError, InvalidInput
from trefoil.profiler.stream_load import held_out, refuse_streams
from trefoil.runtime.model_files import contract

MODELS = Path(__file__).parents[3] / "model_repository"


def test_prompts_are_texts_or_first_of_their_rows(tmp_path):
    assert held_out(MODELS / "pydoc" / "heldout.json")[0] == "def send(self, value):"
    (tmp_path / "heldout.json").write_text(json.dumps(["one", "two"]))
    assert held_out(tmp_path / "heldout.json") == ("one", "two")
    assert held_out(tmp_path / "none.json") == ()


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[""]', '[["a"], []]', "[[1]]", "[" * 100_000, "\x00"])
def test_other_prompts_are_refused_by_file(tmp_path, text):
    (tmp_path / "heldout.json").write_text(text)
    with pytest.raises(CatalogError, match=r"heldout\.json is not a list of prompts"):
        held_out(tmp_path / "heldout.json")


def test_more_streams_than_a_model_decodes_and_models_of_no_api_are_refused(tmp_path):
    write_family(tmp_path)
    refuse_streams(contract(tmp_path, "chat"), 500)
    with pytest.raises(InvalidInput, match=r"--batches = 16: .*pydoc decodes 8 streams"):
        refuse_streams(contract(MODELS, "pydoc"), 16)
    with pytest.raises(InvalidInput, match=r"family = 'numbers'.*no API of language models"):
        refuse_streams(model_config_pb2.ModelConfig(name="numbers"), 1)
