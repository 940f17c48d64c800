"""Models of real sizes on the meta device, for tests of the memory plan."""
import functools
import tempfile

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from runtime.batch import packed_attention
from runtime.memory import ModelShape

FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size")
UNTIED = {"tie_word_embeddings": False}
SIZES = {
    "1.5B": dict(zip(FIELDS, (1536, 8960, 28, 12, 2, 151936))),  # Qwen2.5-1.5B
    "Qwen3": dict(zip(FIELDS, (1024, 3072, 28, 16, 8, 151936)),  # Qwen3-0.6B: queries and keys
                  head_dim=128, model_type="qwen3"),  # have norms, twice as wide as the model
    "7B": dict(zip(FIELDS, (3584, 18944, 28, 28, 4, 152064))) | UNTIED,  # Qwen2.5-7B
    "32B": dict(zip(FIELDS, (5120, 27648, 64, 40, 8, 152064))) | UNTIED,  # Qwen2.5-32B
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
