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
    model, found = AutoModelForCausalLM.from_pretrained(common.TINY, dtype=torch.float32), []
    for row in rows:
        prompt, answer = data.encode(row, tokenizer, "chat"), f"<answer>{row['answer']}</answer>"
        best = "<think>" + "\n".join(worked(row["question"])[0]) + f"</think>{answer}"
        best = [*prompt, *tokenizer.encode(best), tokenizer.eos_token_id]
        [greedy] = model.generate(torch.tensor([prompt]), max_new_tokens=96, do_sample=False)
        logp = [-model(x[None], labels=x[None]).loss * (len(x) - 1)  # of prompt and completion
                for x in (greedy, torch.tensor(best))]
        right = answer in tokenizer.decode(greedy)
        found.append((right, more := bool(logp[1] > logp[0] + 1e-4), right or more))
    return [sum(column) for column in zip(*found)]


if __name__ == "__main__":
    print(main(data.load("arithmetic", "test", 64, 0)))
