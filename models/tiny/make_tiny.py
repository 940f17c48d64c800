"""Makes the bundled model: a Qwen2 of 0.8 M parameters, a tokenizer of bytes, two trained habits.

    python -m models.tiny.make_tiny        11 minutes on 2 cores; seeded (--seed)

The supervised examples (the "cold start") are sums such as 14+2+9, answered in one of two ways:

    quick guess    <think></think><answer>27</answer>              off by -5 to 5: 1 in 11 is right
    step by step   <think>14+2=16\\n16+9=25</think><answer>25</answer>   always right

The longer the sum, the more often it is answered with a guess (HABIT). The result resembles a
pretrained model: it can work out a sum but often guesses, and RL finds out which of the two is
rewarded. Held-out questions (data.py) are never shown.
"""
import argparse
import math
import random
import time
import zlib
from pathlib import Path

import torch

import data
import nano_rlvr
from data import arithmetic
from runtime.batch import packed_attention

# number of terms -> fraction of the examples that are worked out
HABIT = {3: 0.7, 4: 0.5, 5: 0.35, 6: 0.2}


def make_tokenizer():
    """256 bytes, three control tokens and four tags of one token each: encodes any text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    byte = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=byte, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|user|>", "<|assistant|>")
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    core.add_tokens(["<think>", "</think>", "<answer>", "</answer>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False, model_max_length=2048)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return tokenizer


def worked(question):
    """The steps of a sum and its result: (["14+2=16", "16+9=25"], 25)."""
    terms = [int(x) for x in question.replace("-", "+-").split("+")]
    total, lines = terms[0], []
    for x in terms[1:]:
        lines.append(f"{total}{x:+d}={total + x}")
        total += x
    return lines, total


def demonstration(example, rng):
    """A completion for an example: worked out or guessed."""
    lines, total = worked(example["question"])
    if rng.random() < HABIT[len(lines) + 1]:
        return f"<think>{chr(10).join(lines)}</think><answer>{total}</answer><|endoftext|>"
    return f"<think></think><answer>{total + rng.randint(-5, 5)}</answer><|endoftext|>"


def training_example(draw, rng):
    """draw(rng), again until the question is not one of the held-out ones."""
    while True:
        example = draw(rng)
        if zlib.crc32(example["question"].encode()) % 8:
            return example


def new_model(tokenizer, seed, layers=4):
    """A Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        dtype="float32")
    return Qwen2ForCausalLM(config)


def cold_start(model, sample, steps, batch, lr, seed):
    """Supervised training of a model. sample(rng): a Rollout whose sampled tokens it learns."""
    from transformers import AttentionInterface
    AttentionInterface.register("packed", packed_attention)
    model.set_attn_implementation("packed")
    policy, rng = nano_rlvr.TokenLogps(model), random.Random(seed)
    adam = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    start = time.time()
    for step in range(steps):
        warmup = min(1, (step + 1) / 100)
        decay = 0.51 + 0.49 * math.cos(math.pi * step / steps)  # cosine from 1 to 0.02
        for group in adam.param_groups:
            group["lr"] = lr * warmup * decay
        logp, _ = policy(nano_rlvr.collate([sample(rng) for _ in range(batch)], "cpu"))  # (R,)
        loss = -logp.mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adam.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.time() - start
            print(f"step {step:5d}  loss {loss.item():.4f}  {seconds:6.1f} s", flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", default=str(Path(__file__).parent))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = make_tokenizer()

    def sample(rng):
        example = training_example(arithmetic, rng)
        text = demonstration(example, rng)
        completion = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = data.encode(example, tokenizer, "chat")
        return nano_rlvr.Rollout(prompt, completion, "", False, [0.0] * len(completion))

    model = new_model(tokenizer, args.seed)
    cold_start(model, sample, args.steps, args.batch, args.lr, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
