"""A generative family's graph cut between blocks: the chain makes the tokens of the whole."""

import json
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest

from trefoil.core.errors import CatalogError
from trefoil.profiler.split import block_stages, named, write_stages

MODELS = Path(__file__).parents[3] / "model_repository"
BLOCKS = {1: 2, 2: 3, 3: 4, 4: 5}


class Chain:
    """Stages one after the other in place of the whole graph's session."""

    def __init__(self, paths):
        self.sessions = [onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in paths]

    def run(self, names, feeds):
        known = dict(feeds)
        for session in self.sessions:
            outputs = [one.name for one in session.get_outputs()]
            own = {one.name: known[one.name] for one in session.get_inputs()}
            known |= dict(zip(outputs, session.run(outputs, own), strict=True))
        return [known[name] for name in names]


@pytest.fixture
def decoder_class(monkeypatch):
    monkeypatch.syspath_prepend(str(MODELS / "_shared"))
    from decoding import Decoder

    yield Decoder
    sys.modules.pop("decoding", None)


@pytest.mark.parametrize(("version", "stages"), [(1, 2), (2, 2), (3, 3), (3, 4), (4, 2), (4, 5)])
def test_whole_blocks_with_their_caches_make_the_same_tokens(version, stages, tmp_path, decoder_class):
    path = MODELS / "pydoc" / str(version) / "model.onnx"
    cut = block_stages(named(path, tmp_path / "whole.onnx"), stages)
    caches = [{name.rpartition("_")[2] for name in stage.inputs if name.startswith("PAST_")} for stage in cut]
    assert sorted(block for own in caches for block in own) == [str(i) for i in range(BLOCKS[version])]
    assert max(map(len, caches)) - min(map(len, caches)) <= 1
    assert [len([name for name in stage.outputs if name.startswith("KEY_")]) for stage in cut] == [*map(len, caches)]
    whole, chained = decoder_class(path, 1), decoder_class(path, 1)
    chained.session = Chain(write_stages(tmp_path / "whole.onnx", cut, tmp_path))
    prompts = [prompt.encode() for prompt, _ in json.loads((MODELS / "pydoc" / "heldout.json").read_text())[:6]]
    assert [chained.answer(prompt) for prompt in prompts] == [whole.answer(prompt) for prompt in prompts]


def test_more_stages_than_blocks_are_refused(tmp_path):
    model = named(MODELS / "pydoc" / "2" / "model.onnx", tmp_path / "whole.onnx")
    with pytest.raises(CatalogError, match="has 3 blocks with caches"):
        block_stages(model, 4)
    with pytest.raises(CatalogError, match="has 0 blocks"):
        block_stages(onnx.load(str(MODELS / "digits" / "1" / "model.onnx")), 2)
