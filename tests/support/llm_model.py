"""Run in `.venv-engines`: makes the tiny language model that all engines serve, and judges sampling parameters as vLLM.

`llm_model.py make FOLDER`: a Llama of 3 M random weights and a tokenizer trained on the standard library, as Hugging
Face's files (FOLDER/tiny) and as GGUF (FOLDER/tiny.gguf). Weights are large, so that at temperature 0 each prompt has
another text and no two tokens are nearly equally likely; answers of a hundred tokens often end by themselves.
`llm_model.py judge`: JSON list of sampling parameters on stdin; on stdout a list of true (vLLM takes them) and false.
"""

import json
import sys
import sysconfig
from pathlib import Path

VOCABULARY = 2048
CONTEXT = 2048
END = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def make(folder):
    """Hugging Face's files."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train([str(file) for file in files], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=special[0], eos_token=special[END], pad_token=special[0],
        model_max_length=CONTEXT, chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=END,
        pad_token_id=0, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.lm_head.weight.data[END] *= 1.4
    model.save_pretrained(folder)


def write_gguf(folder, out):
    """The same model for llama.cpp."""
    import gguf
    import numpy as np
    import safetensors.numpy

    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    config, tokens = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_pooling_type(gguf.PoolingType.MEAN)  # of embeddings; without it llama.cpp's server answers one a token
    vocabulary = tokens["model"]["vocab"]
    special = {one["id"] for one in tokens["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    kinds = [gguf.TokenType.CONTROL if at in special else gguf.TokenType.NORMAL for at in range(VOCABULARY)]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(one) if isinstance(one, list) else one for one in tokens["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")):
        writer.add_tensor(f"{name}.weight", weights[f"{tensor}.weight"])
    for layer in range(config["num_hidden_layers"]):
        for theirs, name in GGUF_NAMES.items():
            made = weights[f"model.layers.{layer}.{theirs}.weight"]
            if name in ("attn_q", "attn_k"):  # llama.cpp has another order of rotary halves
                count = heads if name == "attn_q" else kv_heads
                made = made.reshape(count, 2, -1, made.shape[1]).swapaxes(1, 2).reshape(made.shape)
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ascontiguousarray(made))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def judge(cases):
    """Whether vLLM takes each, with values of other types cast as Triton's vLLM backend casts them."""
    from vllm import SamplingParams

    casts = {int: int, float: float, bool: bool, str: str, int | None: int}
    known = SamplingParams.__annotations__

    def taken(given):
        try:
            cast = {n: casts[known[n]](v) if known.get(n) in casts else v for n, v in given.items()}
            return SamplingParams(**cast) is not None
        except Exception:  # noqa: BLE001 - as the backend does
            return False

    return [taken(given) for given in cases]


if __name__ == "__main__":
    if sys.argv[1] == "judge":
        print(json.dumps(judge(json.load(sys.stdin))))
    else:
        target = Path(sys.argv[2])
        make(target / "tiny")
        write_gguf(target / "tiny", target / "tiny.gguf")
