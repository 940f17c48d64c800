"""A model with random weights in the exact shape of a real one: for speed and memory, without a download.

    python bench/random_model.py FOLDER [qwen2.5-1.5b | qwen2.5-7b | small | tiny] [--mean 700]

Writes FOLDER/questions.jsonl and to FOLDER the weights, a byte-level tokenizer padded to the vocabulary, and
a generation config in which one token in `mean` ends a completion: random weights sample nearly uniformly, so
that lengths are geometrically distributed with that mean.
"""
import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging

FRUIT = ("apples", "pears", "plums", "figs")
TINY = Path(__file__).resolve().parents[1] / "models/tiny"
SHAPES = {
    # from Qwen's config.json files
    "qwen2.5-1.5b": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, rope_theta=1e6),
    "qwen2.5-7b": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False, rope_theta=1e6),
    # made up, for a CPU
    "small": dict(
        hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=True),
    "tiny": dict(
        hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=True),
}


def sizes(hidden, layers, vocab):
    """A shape with the proportions of Qwen2.5-1.5B, which it is for 1536, 28, 151936. hidden: 128 or more."""
    head_size = 128 if hidden >= 1536 else 64
    return dict(hidden_size=hidden, intermediate_size=hidden * 35 // 6, num_hidden_layers=layers,
                num_attention_heads=hidden // head_size, num_key_value_heads=2, vocab_size=vocab,
                tie_word_embeddings=True)


def make(folder, shape="qwen2.5-1.5b", mean=700, seed=0):
    """Writes the model into `folder`: in bf16 from a hidden size of 1536 on, below in fp32. shape: a name in
    SHAPES, or a dict like those. The same weights at every call."""
    size, folder = SHAPES[shape] if isinstance(shape, str) else shape, Path(folder)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**size, max_position_embeddings=32768),
            dtype=torch.bfloat16 if size["hidden_size"] >= 1536 else torch.float32)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    used = {*vocab.values(), *(t["id"] for t in tokenizer["added_tokens"])}
    vocab.update({f"<random {i}>": i for i in range(size["vocab_size"]) if i not in used})
    eos = next(t["id"] for t in tokenizer["added_tokens"])
    unused = sorted(set(range(size["vocab_size"])) - used)
    more_stops = max(0, round(size["vocab_size"] / mean) - 1)
    stops = [eos, *random.Random(seed).sample(unused, more_stops)]
    model.generation_config = GenerationConfig(eos_token_id=stops, do_sample=True)
    model.config.eos_token_id = eos
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer)))
    wrapped.eos_token = wrapped.pad_token = wrapped.convert_ids_to_tokens(eos)
    wrapped.save_pretrained(folder)
    rng = random.Random(seed)
    with (folder / "questions.jsonl").open("w") as f:
        for _ in range(4096):
            items = " and ".join(f"{rng.choice(FRUIT)} for {rng.randint(2, 99)} cents" for _ in range(4))
            row = {"question": f"How much are {items}?", "answer": str(rng.randint(8, 400))}
            f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    args = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    args.add_argument("folder")
    args.add_argument("shape", nargs="?", default="qwen2.5-1.5b", choices=SHAPES)
    args.add_argument("--mean", type=int, default=700)
    make(**vars(args.parse_args()))
