"""Models of real sizes on the meta device, for tests of the memory plan."""
import functools
import tempfile

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from runtime.batch import packed_attention
from runtime.shape import ModelShape

SIZES = {
    "1.5B": dict(  # Qwen2.5-1.5B
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936),
    "Qwen3": dict(  # Qwen3-0.6B: queries and keys have norms and are twice as wide as the model
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, model_type="qwen3"),
    "7B": dict(  # Qwen2.5-7B
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False),
    "32B": dict(  # Qwen2.5-32B
        hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
        num_key_value_heads=8, vocab_size=152064, tie_word_embeddings=False),
}


def make(size, dtype=torch.float32):
    """A model with these fields of its config.json."""
    AttentionInterface.register("packed", packed_attention)
    config = AutoConfig.for_model(**{"model_type": "qwen2", "tie_word_embeddings": True} | size)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="packed")


@functools.cache
def shape_of(name):
    """The shape of a row of SIZES."""
    with torch.device("meta"), tempfile.TemporaryDirectory() as folder:
        make(SIZES[name]).config.save_pretrained(folder)
        return ModelShape.of(folder)
