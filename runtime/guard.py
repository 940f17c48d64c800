"""Checks around the loop: the rehearsal before step 0, and a user's rollout function."""
import copy
import gc
import inspect
import math
import random

import torch

from runtime import memory, ranks, stop
from runtime.batch import Rollout, collate
from runtime.memory import ModelShape
from runtime.messages import RunError
from runtime.trainer import adamw_states, on_device
from runtime.verify.user_code import load, user_error


def random_tokens(rng, vocab, most):
    """At most 16 token ids."""
    return rng.choices(range(vocab), k=min(16, most))


def pack_of(sequences, layout):
    """A pack of (prompt, completion) pairs of token ids, as if vLLM had sampled them."""
    rollouts = []
    for prompt, completion in sequences:
        logps = [0.0] * len(completion)
        rollouts.append(Rollout(prompt, completion, "", False, logps, weight=1.0))
    return collate(rollouts, layout=layout)


def logps_of(policy, sequences, layout):
    """Log-probs of a pack of (prompt, completion) pairs: (R,)."""
    logp, _ = policy(pack_of(sequences, layout))  # (R,)
    return logp


def library_logps(policy, sequence, cfg):
    """Log-probs of a (prompt, completion) pair from the logits that the library computes: (R,)."""
    module = getattr(policy, "module", policy)  # of DeepSpeed's engine
    pack = pack_of([sequence], cfg.layout)
    inputs = {"input_ids": pack.input_ids}  # (1, T)
    if cfg.layout != "rows":
        inputs["pack"] = pack
    logits = module.model(**inputs, use_cache=False).logits[0]  # (T, V)
    logits = logits[pack.predictors].float() / cfg.temperature  # (R, V)
    logps = logits.log_softmax(-1)  # (R, V)
    return logps.gather(1, pack.targets[:, None])[:, 0]  # (R,)


@torch.no_grad()
def check_packing(policy, cfg):
    """Raises RunError if a log-prob depends on the other sequences of a pack, or differs from the
    library's. Collective.

    With random tokens, two completions per prompt:
    1. Together and alone, log-probs differ by no more than the noise of the dtype.
    2. In a pack, if every second completion is replaced, the log-probs of the others do not change,
       in any dtype (bound 2^-17), because shapes and kernels stay the same. For mixture-of-experts
       models, and where kernels do not repeat their results, the bound is that of 1.
    3. Alone, log-probs are those of the library's own logits: its LM head may have more parts.
    """
    rng = random.Random(0)
    vocab = ModelShape.of(cfg.model).vocab
    first = random_tokens(rng, vocab, cfg.max_prompt)
    second = random_tokens(rng, vocab, cfg.max_prompt)
    prompts = [first, first, second, second]
    completions = [random_tokens(rng, vocab, cfg.max_tokens) for _ in prompts]
    others = completions.copy()
    for i in (0, 2):
        others[i] = random_tokens(rng, vocab, cfg.max_tokens)
    if cfg.layout == "rows":  # of different lengths, so that there is padding
        for i, n in enumerate((1, 16, 5, 9)):
            del completions[i][n:]
    sequences = list(zip(prompts, completions))
    replaced = list(zip(prompts, others))
    together = logps_of(policy, sequences, cfg.layout)  # (R,)
    alone = [logps_of(policy, [sequence], cfg.layout) for sequence in sequences]  # (R / 4,) each
    experts = any("expert" in name for name, _ in policy.named_parameters())
    # two kernels differ by 0.02 to 0.05 in bfloat16; in float32 the bound is 8,000 roundings
    noise = max(cfg.mismatch_bound, 0.15 if cfg.dtype == "bfloat16" else 1e-3)
    library = library_logps(policy, sequences[-1], cfg)  # (R / 4,)
    checks = [
        (together - torch.cat(alone), noise,
         "batched and single sequences give different log-probs"),
        (alone[-1] - library, noise, "its logits are not hidden states times the LM head"),
    ]
    if cfg.layout != "rows":
        others_replaced = logps_of(policy, replaced, cfg.layout)  # (R,)
        again = logps_of(policy, sequences, cfg.layout)  # (R,)
        repeats = all(ranks.all_gather([torch.equal(together, again)]))
        exact = noise
        if repeats and not experts:
            exact = 2**-17  # 64 roundings of log-probs in float32
        kept = (together - others_replaced).view(4, -1)[1::2]  # (2, R / 4)
        checks.append((kept, exact, "the log-probs of a sequence depend on the others in its pack"))
    for difference, bound, fault in checks:
        difference = difference.abs().nan_to_num(torch.inf)
        mean = max(ranks.all_gather([difference.mean().item()]))
        if mean > bound:
            advice = "" if cfg.layout == "rows" else "; --layout rows may train it"
            raise RunError(f"--model {cfg.model}: {fault} (mean |difference| {mean:.2g}, bound "
                           f"{bound:.2g}): this model is not supported{advice}")


def largest_pack(cfg):
    """(prompt tokens, completion tokens) of each sequence of the largest pack that can occur: one
    has the largest length, the others a prompt of one token, for many rows of the LM head (at most
    max_prompt - 1 more are possible). A pack has no more sequences than a step."""
    longest = cfg.max_prompt + cfg.max_tokens
    if cfg.layout == "rows":
        fitting = cfg.pack_tokens // longest
        rows = max(1, min(fitting, cfg.prompts * cfg.samples))
        return [(cfg.max_prompt, cfg.max_tokens)] * rows
    sequences = [(cfg.max_prompt, cfg.max_tokens)]
    left = cfg.pack_tokens - longest
    while left >= 2 and len(sequences) < cfg.prompts * cfg.samples:
        sequences.append((1, min(left - 1, cfg.max_tokens)))
        left -= sum(sequences[-1])
    return sequences


def with_lengths(lengths, vocab):
    """(prompt, completion) pairs with these numbers of tokens, each with a prompt of its own."""
    sequences = []
    for i, (prompt, completion) in enumerate(lengths):
        sequences.append(([i % vocab] * prompt, [0] * completion))
    return sequences


def rehearse(policy, ref, cfg):
    """check_packing, then two steps at learning rate 0: too little memory shows before step 0. The
    first, on two sampled tokens, creates AdamW's moments; the other is on the largest pack. Weights
    and optimizer are then as before. Raises RunError: see check_packing. Collective."""
    check_packing(policy, cfg)
    vocab = ModelShape.of(cfg.model).vocab
    two_tokens = with_lengths([(1, 2)], vocab)  # a size of 1 is compiled apart
    smallest = pack_of(two_tokens, cfg.layout)
    largest = pack_of(with_lengths(largest_pack(cfg), vocab), cfg.layout)
    for group in policy.optimizer.param_groups:
        group["lr"] = 0.0
    if ref is not None:
        with torch.no_grad(), on_device(ref):
            ref(largest)
    for pack in (smallest, largest):
        logp, _ = policy(pack)  # (R,)
        policy.backward(-logp.mean())
        policy.step()
    for state in adamw_states(policy):
        for name, value in state.items():
            # a tensor, also where it is NaN; DeepSpeed's CPU AdamW counts steps in an int
            state[name] = value.zero_() if torch.is_tensor(value) else 0
    gc.freeze()  # what exists now stays: vLLM's collections, thrice a step, pass over it


# ---- a rollout function of the user's

def load_rollout(spec):
    """The function of --rollout, my_file.py:my_rollout, with the signature of the script's rollout.

    The user's function gets `examples`, a copy, if it has a parameter of this name. Raises
    ValueError if the function cannot be loaded or takes other arguments. The function that is
    returned raises RunError, with the user's line, for an exception in it and for a Rollout that
    does not fit.
    """
    rollout = load(spec, kind="rollout")
    extra = {"examples": []} if "examples" in inspect.signature(rollout).parameters else {}
    try:
        for positional in 5, 6:  # the greedy evaluation gives no seeds
            inspect.signature(rollout).bind(*range(positional), top_p=1.0, **extra)
    except TypeError as e:
        raise ValueError(f"--rollout {spec}: {e}; rollout() shows what it must take") from None

    def sample(llm, prompts, n, temperature, max_tokens, *seeds, examples=(), **sampling):
        if extra:
            sampling["examples"] = copy.deepcopy(examples)
        copies = [list(prompt) for prompt in prompts]
        try:
            rollouts = rollout(llm, copies, n, temperature, max_tokens, *seeds, **sampling)
        except (Exception, SystemExit) as e:
            if isinstance(e, RunError) or memory.is_out_of_memory(e) or stop.is_lost_rank(e):
                raise
            raise RunError(f"--rollout {spec}: {user_error(e, spec)}") from e
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        problem = first_misfit(rollouts, prompts, n, vocabulary, max_tokens)
        if problem:
            raise RunError(f"--rollout {spec}: {problem}")
        for r in rollouts:
            r.advantages = [0.0] * len(r.completion)  # which may have grown since it was made
        return rollouts

    return sample


def first_misfit(rollouts, prompts, n, vocabulary, max_tokens):
    """What is wrong with the result of a user's function, in words; "" if nothing."""
    if not isinstance(rollouts, list) or len(rollouts) != len(prompts) * n:
        return (f"it must return a list of {n} Rollouts for each of {len(prompts)} prompts, not "
                f"{rollouts!r:.60}")
    for i, r in enumerate(rollouts):
        if problem := misfit(r, prompts[i // n], vocabulary, max_tokens):
            return f"Rollout {i} does not fit: {problem}"
    return ""


def misfit(r, prompt, vocabulary, max_tokens):
    """What is wrong with a user's Rollout for a prompt (token ids), in words; "" if nothing."""
    is_of_prompt = isinstance(r, Rollout) and r.prompt == prompt
    if not is_of_prompt or not isinstance(r.text, str):
        return "it is no Rollout, or without text, or not in the order of the prompts"
    lists = [r.completion, r.vllm_logps, r.loss_mask, *r.extra.values()]
    n = len(r.loss_mask)
    if any(type(values) is not list or len(values) != n for values in lists):
        return "completion, vllm_logps, loss_mask and those in extra: not lists of one length"
    if r.outcome is not None and not math.isfinite(r.outcome):
        return f"its outcome is {r.outcome}"
    if len(r.loss_mask) > max_tokens or True not in r.loss_mask:
        return "it has more than --max_tokens tokens, or no token is sampled"
    for token, logp, sampled in zip(*lists[:3]):
        is_token = type(token) is int and 0 <= token < vocabulary
        is_logp = isinstance(logp, (int, float)) and -math.inf < logp <= 1e-3  # rounded
        if not (is_token and is_logp and isinstance(sampled, bool)):
            return (f"a token has id {token!r}, log-prob {logp!r}, sampled {sampled!r}; they must "
                    f"be an int below {vocabulary}, finite and at most 0, and a bool")
    return ""
