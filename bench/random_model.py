"""A model with random weights in the exact shape of a real one: for speed and memory.

    python -m bench.random_model FOLDER [qwen2.5-1.5b | small | tiny] [--mean 700]

Writes the weights to FOLDER, a byte-level tokenizer padded to the vocabulary, and questions.jsonl.
Random weights sample nearly uniformly. The end token alone has a larger logit, so that it is drawn
once in `mean` tokens: lengths are geometrically distributed with that mean.
"""
import json
import math
import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from bench import common

FRUIT = ("apples", "pears", "plums", "figs")


def sizes(hidden, layers, vocab):
    """A shape with the proportions of Qwen2.5-1.5B. hidden: a multiple of 128."""
    head_size = 128 if hidden >= 1536 else 64
    return dict(hidden_size=hidden, intermediate_size=hidden * 35 // 6, num_hidden_layers=layers,
                num_attention_heads=hidden // head_size, num_key_value_heads=2, vocab_size=vocab,
                tie_word_embeddings=True)


SHAPES = {
    "qwen2.5-1.5b": sizes(1536, 28, 151936),
    "small": sizes(256, 6, 4096) | {"intermediate_size": 768},  # made up, for a CPU
    "tiny": sizes(128, 2, 4096),
}


@torch.no_grad()
def end_once_in(mean, model, token):
    """Gives a token the probability 1 / mean, at any place of any text, where all others share the
    rest. Channel 0 of the embeddings, which the head shares, is so large that it is the same for
    all hidden states after the last norm, whose factor for it is so small that all logits get 1.
    The token's own row has as much more as its logit needs."""
    large = 1000.0
    embeddings = model.get_input_embeddings().weight  # (V, H)
    norm = model.model.norm.weight  # (H,)
    vocab, hidden = embeddings.shape
    embeddings[:, 0] = large
    embeddings[token, 0] = large * (1 + math.log((vocab - 1) / (mean - 1)))
    norm[0] = 1 / (large * math.sqrt(hidden))


def make(folder, shape="qwen2.5-1.5b", mean=700):
    """Writes the model, in bf16 from a hidden size of 1536 on. shape: a name in SHAPES, or a dict
    like those. Returns the flags with which nano_rlvr.py trains it."""
    folder = Path(folder)
    size = SHAPES[shape] if isinstance(shape, str) else shape
    dtype = torch.bfloat16 if size["hidden_size"] >= 1536 else torch.float32
    config = transformers.Qwen2Config(**size, max_position_embeddings=32768)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tokenizer = json.loads(Path(common.TINY, "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = [token["id"] for token in tokenizer["added_tokens"]]
    used = {*vocab.values(), *special}
    for number in range(size["vocab_size"]):
        if number not in used:
            vocab[f"<random {number}>"] = number
    eos = special[0]
    end_once_in(mean, model, eos)
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, do_sample=True)
    model.config.eos_token_id = eos
    model.save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer)))
    wrapped.eos_token = wrapped.pad_token = wrapped.convert_ids_to_tokens(eos)
    wrapped.save_pretrained(folder)
    write_questions(folder / "questions.jsonl")
    return ["--model", str(folder), "--data", f"{folder}/questions.jsonl", "--task", "gsm8k",
            "--template", "none"]


def write_questions(path):
    """4,096 made-up questions: their answers do not matter."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(4096):
            items = [f"{rng.choice(FRUIT)} for {rng.randint(2, 99)} cents" for _ in range(4)]
            question = f"How much are {' and '.join(items)}?"
            answer = str(rng.randint(8, 400))
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


if __name__ == "__main__":
    args = common.parser(__doc__)
    args.add_argument("folder")
    args.add_argument("shape", nargs="?", default="qwen2.5-1.5b", choices=SHAPES)
    args.add_argument("--mean", type=int, default=700)
    make(**vars(args.parse_args()))
