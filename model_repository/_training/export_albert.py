"""Export the variants of the family `albert` to ONNX, from the architectures of transformers.

Run: in the environment of `make .venv-export/.ready`, with --random-weights where no model hub can be reached.
albert-xlarge needs 1 GB of memory and albert-xxlarge 3 GB while they are exported.
Weights: the SQuAD 2.0 checkpoints that CLOVER's artifact serves, from the Hugging Face hub; they are other people's, so
look at each one's licence before you pass an export on. Or seeded random ones.

Every variant takes INPUT_IDS, ATTENTION_MASK and TOKEN_TYPE_IDS int64 [N,T], T <= 512 (question, separator, context, as
the ALBERT tokenizer writes them), and returns START_LOGITS and END_LOGITS float32 [N,T].
"""

import gc

import common
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForQuestionAnswering

TOKENS = 32  # of the traced question; any number up to 512 can be sent
INPUTS = ("INPUT_IDS", "ATTENTION_MASK", "TOKEN_TYPE_IDS")
OUTPUTS = ("START_LOGITS", "END_LOGITS")
# hidden size, layers, heads, intermediate size: Lan et al., table 1. The checkpoints: CLOVER's artifact, app_albert.py.
SHAPES = {
    "albert-base": (768, 12, 12, 3072, "twmkn9/albert-base-v2-squad2"),
    "albert-large": (1024, 24, 16, 4096, "elgeish/cs224n-squad2.0-albert-large-v2"),
    "albert-xlarge": (2048, 24, 16, 8192, "ktrapeznikov/albert-xlarge-v2-squad-v2"),
    "albert-xxlarge": (4096, 12, 64, 16384, "mfeb/albert-xxlarge-v2-squad2"),
}


class Answers(nn.Module):
    """Token ids [N,T] to where the answer starts and ends, [N,T] each."""

    def __init__(self, model: AlbertForQuestionAnswering) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answer = self.model(input_ids=ids, attention_mask=mask, token_type_ids=types)
        return answer.start_logits, answer.end_logits


def with_random_weights(name: str, seed: int) -> AlbertForQuestionAnswering:
    """Layer norms keep activations at scale; only the head is widened, so that logits differ visibly."""
    hidden, layers, heads, intermediate, _ = SHAPES[name]
    torch.manual_seed(seed)
    model = AlbertForQuestionAnswering(
        AlbertConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            attn_implementation="eager",
        )
    )
    nn.init.normal_(model.qa_outputs.weight, std=1.0 / hidden**0.5)
    return model


def main() -> None:
    given = common.arguments(common.REPOSITORY / "albert", __doc__.splitlines()[0])
    chance = torch.Generator().manual_seed(given.seed + 1)
    ids = torch.randint(5, 30000, (1, TOKENS), generator=chance)
    types = (torch.arange(TOKENS) >= TOKENS // 3).long()[None]
    for variant in given.variants:
        name = variant["name"]
        if given.random_weights:
            model = with_random_weights(name, given.seed)
        else:
            model = common.pretrained(
                lambda checkpoint: AlbertForQuestionAnswering.from_pretrained(checkpoint, attn_implementation="eager"),
                SHAPES[name][-1],
            )
        common.save(
            Answers(model),
            given.out / str(variant["version"]) / "model.onnx",
            dict(zip(INPUTS, (ids, torch.ones_like(ids), types), strict=True)),
            OUTPUTS,
            {tensor: {0: "N", 1: "T"} for tensor in (*INPUTS, *OUTPUTS)},
        )
        del model
        gc.collect()


if __name__ == "__main__":
    main()
