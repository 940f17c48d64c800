"""Asks a model questions: type one, read its answer. Each question is asked alone.

    python -m examples.chat runs/x                  the trained model of a run
    python -m examples.chat models/tiny             what it was before: any model folder or hub name
    python -m examples.chat runs/x --eval_n 4       the greedy answer and four samples
    echo "13-2-3-1+6-13" | python -m examples.chat runs/x

Flags of nano_rlvr.py may follow. Template, length and temperature are those of the run, and an
answer ends at the tokens that ended it there. transformers answers, because vLLM takes most of a
minute to start. --rollout lets a model use its tools, and starts vLLM.
"""
import contextlib
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

import data
import nano_rlvr as nr
from runtime import guard, ranks, stop
from runtime.messages import RunError


def parse(argv):
    """argv -> Config. Its first word is a run, a folder or a hub name. Raises ValueError."""
    name, *flags = argv or [""]
    if name.startswith("-") or not name:
        raise ValueError("name a run or a model: python -m examples.chat runs/x")
    final = Path(name) / "final"
    cfg = nr.parse_config(["--model", str(final if final.is_dir() else name), *flags])
    # on a GPU: all for vLLM, as nothing is trained
    return dataclasses.replace(cfg, gpu_memory_utilization=cfg.gpu_memory_utilization or 0.9)


def load(cfg):
    """What ask() needs of vLLM's LLM, with a model of transformers."""
    tokenizer = nr.load_tokenizer(cfg)  # says in one line what is wrong with a model
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model, dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
    model.to(ranks.device())
    return SimpleNamespace(model=model, get_tokenizer=lambda: tokenizer)


@torch.inference_mode()
def by_transformers(llm, prompts, n, temperature, max_tokens, examples=(), top_p=1.0):
    """nano_rlvr.rollout of one prompt. llm: see load."""
    [prompt] = prompts
    tokenizer = llm.get_tokenizer()
    ends = llm.model.generation_config.eos_token_id or []  # an int or a list
    ends = set(ends if isinstance(ends, list) else [ends])
    ends.add(tokenizer.eos_token_id)
    ends.add(tokenizer.get_vocab().get("<|im_end|>"))  # ends a ChatML turn; EOS may differ
    ends.discard(None)
    sampling = {}
    if temperature:
        sampling = dict(temperature=temperature, top_p=top_p, top_k=0, num_return_sequences=n)
    found = llm.model.generate(
        torch.tensor([prompt], device=llm.model.device),  # (1, P)
        max_new_tokens=max_tokens,
        do_sample=temperature > 0,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends, default=0),
        **sampling)  # (n, P + C)
    rollouts = []
    for ids in found[:, len(prompt):].tolist():
        length = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
        completion = ids[:length]  # what follows is padding
        truncated = completion[-1] not in ends
        rollouts.append(nr.Rollout(prompt, completion, "", truncated, [0.0] * length))
    for r, text in zip(rollouts, data.completion_texts(rollouts, tokenizer)):
        r.text = text
    return rollouts


def ask(llm, question, cfg):
    """Rollouts: the greedy completion of a question, then --eval_n samples."""
    example = {"question": question}
    prompt = data.encode(example, llm.get_tokenizer(), cfg.template)
    if len(prompt) > cfg.max_prompt:
        raise RunError(f"{len(prompt)} tokens, longer than --max_prompt {cfg.max_prompt}")
    sample = guard.load_rollout(cfg.rollout) if cfg.rollout else by_transformers
    found = sample(llm, [prompt], 1, 0.0, cfg.max_tokens, examples=[example])
    if cfg.eval_n:
        found += sample(llm, [prompt], cfg.eval_n, cfg.eval_temperature, cfg.max_tokens,
                        examples=[example], top_p=cfg.eval_top_p)
    return found


def main(argv=None):
    with stop.with_one_line(ValueError, OSError, RuntimeError):
        cfg = parse(sys.argv[1:] if argv is None else argv)
        ranks.init_process_group(cfg.timeout)
        llm = nr.Sampler(cfg) if cfg.rollout else load(cfg)
    print("A question per line; an empty one ends.")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while question := input("> "):
            try:
                for r in ask(llm, question, cfg):
                    print(r.text, f"[{r.length} tokens]" if r.truncated else "", flush=True)
            except (RunError, ValueError) as e:
                print(e)


if __name__ == "__main__":
    main()
