"""What greedy decoding lacks is search: it misses answers that are more probable as a whole.

    OMP_NUM_THREADS=1 python -m learn.lab.search      a minute on a core

The bundled model before RL, its greedy answers to 64 held-out sums beside the sums worked out.
"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
from bench import common
from models.tiny.make_tiny import worked


@torch.no_grad()
def main(rows):
    """(greedy answers that are right, worked-out ones that are more probable, right answers if the
    more probable one of the two is taken)"""
    tokenizer = AutoTokenizer.from_pretrained(common.TINY)
    model = AutoModelForCausalLM.from_pretrained(common.TINY, dtype=torch.float32)
    counts = [0, 0, 0]
    for row in rows:
        prompt = data.encode(row, tokenizer, "chat")
        answer = f"<answer>{row['answer']}</answer>"
        steps, _ = worked(row["question"])
        text = "<think>" + "\n".join(steps) + f"</think>{answer}"
        ids = [*prompt, *tokenizer.encode(text), tokenizer.eos_token_id]
        best = torch.tensor(ids)  # (T,)
        prompts = torch.tensor([prompt])  # (1, T of the prompt)
        [greedy] = model.generate(prompts, max_new_tokens=96, do_sample=False)
        is_right = answer in tokenizer.decode(greedy)
        is_beaten = bool(log_prob(model, best) > log_prob(model, greedy) + 1e-4)
        counts[0] += is_right
        counts[1] += is_beaten
        counts[2] += is_right or is_beaten
    return counts


def log_prob(model, ids):
    """() of all tokens (T,) but the first: the prompt is the same in both, and cancels."""
    loss = model(ids[None], labels=ids[None]).loss  # ()
    return -loss * (len(ids) - 1)


if __name__ == "__main__":
    print(main(data.load("arithmetic", "test", 64, 0)))
