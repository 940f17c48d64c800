"""Makes the bundled model: a byte-level tokenizer and a Qwen2 of 0.8 M parameters with two habits from supervised training.

    python models/tiny/make_tiny.py        11 minutes on 2 cores; seeded (--seed)

What the model is shown (its "cold start"): sums such as 14+2+9, each answered in one of two ways,

    quick guess    <think></think><answer>27</answer>                       right once in eleven: off by -5 to 5
    step by step   <think>14+2=16\\n16+9=25</think><answer>25</answer>       always right

and it is shown guesses more often the longer the sum is (HABIT). It ends up as a pretrained model does: it can work things out,
but often does not bother to. Which way pays is for RL to find; held-out questions (data.py) are never shown.
"""
import argparse
import math
import random
import sys
import time
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import data
import nano_rlvr

HABIT = {3: 0.7, 4: 0.5, 5: 0.35, 6: 0.2}  # number of terms -> share of the examples that are worked out


def make_tokenizer():
    """256 bytes, three control tokens and the four tags as one token each: any text fits, an answer stays short."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    byte = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=byte, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|user|>", "<|assistant|>")])
    core.add_tokens(["<think>", "</think>", "<answer>", "</answer>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
                                        clean_up_tokenization_spaces=False, model_max_length=2048)
    tokenizer.chat_template = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return tokenizer


def demonstration(example, rng):
    """The text that an example is answered with in the cold start."""
    terms = [int(x) for x in example["question"].replace("-", "+-").split("+")]
    total, lines = terms[0], []
    for x in terms[1:]:
        lines.append(f"{total}{x:+d}={total + x}")
        total += x
    if rng.random() < HABIT[len(terms)]:
        return f"<think>{chr(10).join(lines)}</think><answer>{total}</answer><|endoftext|>"
    return f"<think></think><answer>{total + rng.randint(-5, 5)}</answer><|endoftext|>"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
    AttentionInterface.register("packed", nano_rlvr.packed_attention)

    tokenizer = make_tokenizer()
    torch.manual_seed(args.seed)
    model = Qwen2ForCausalLM._from_config(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        dtype="float32"), attn_implementation="packed")
    policy, rng = nano_rlvr.TokenLogps(model), random.Random(args.seed)
    adam = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    start = time.time()
    for step in range(args.steps):
        for group in adam.param_groups:  # warm-up, then a cosine to 2 %
            group["lr"] = args.lr * min(1, (step + 1) / 100) * (0.51 + 0.49 * math.cos(math.pi * step / args.steps))
        batch = []
        while len(batch) < args.batch:
            example = data.arithmetic(rng)
            if zlib.crc32(example["question"].encode()) % 8:  # not one of the held-out questions
                answer = tokenizer(demonstration(example, rng), add_special_tokens=False)["input_ids"]
                batch.append(nano_rlvr.Rollout(data.encode(example, tokenizer, "chat"), answer, "", False, [0.0]))
        logp, _ = policy(nano_rlvr.collate(batch))  # (R,)
        loss = -logp.mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adam.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.time() - start:6.1f} s", flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
