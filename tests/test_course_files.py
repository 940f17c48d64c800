"""The files of examples/ and bench/ that course texts ask for and that are short."""
import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import data
import nano_rlvr as nr
from bench import compute_share
from conftest import ENV, ROOT, close, fixed_rollouts, make_config, read_rows, write_rows
from examples import four_models, own_questions, process_model, proofs, quantised, shared_critic
from learn import dpo
from runtime import trainer
from runtime.messages import RunError

# ---- examples/proofs.py

def is_true(formula, facts):
    condition, arrow, conclusion = formula.rpartition("->")
    holds = facts >= set(conclusion.split("&"))
    return holds or (arrow and not facts >= set(condition.split("&")))


def entailed(formula, premises):
    """By truth tables."""
    letters = sorted(set("".join([formula, *premises])) & set(proofs.LETTERS))
    for values in itertools.product((True, False), repeat=len(letters)):
        facts = set(itertools.compress(letters, values))
        if all(is_true(premise, facts) for premise in premises) and not is_true(formula, facts):
            return False
    return True


def test_the_checker_of_proofs_accepts_only_what_follows_by_truth_tables():
    rng = random.Random(0)
    counts = [0, 0]
    for _ in range(60):
        premises = proofs.draw(rng)["premises"]
        letters = sorted(set("".join(premises)) & set(proofs.LETTERS))
        formulas = [*letters, *map("&".join, itertools.permutations(letters, 2)), *premises]
        for formula, used in itertools.product(formulas, itertools.permutations(premises, 2)):
            for some in (used, used[:1]):
                accepted = proofs.follows(formula, some)
                assert not accepted or entailed(formula, some), (formula, some)
                counts[accepted] += 1
    assert min(counts) > 100


def test_a_proof_counts_if_each_line_follows_and_its_steps_say_where_it_breaks():
    premises = ["a", "b", "a&b->c", "c->d"]
    columns = {"answer": "d", "premises": [premises]}
    whole = "<think>?</think>5. a&b from 1 2\n6. c from 5 3\n\nd from 6, 4"
    assert proofs.proof([whole], **columns) == [1.0]
    head = len("<think>?</think>5. a&b from 1 2\n")
    ends = [head, head + len("6. c from 5 3\n"), len(whole)]
    assert proofs.steps([whole], **columns) == [[(end, 1.0) for end in ends]]
    for wrong, values in (
            ("5. c from 1 3\n6. d from 5 4", [0, 0]),  # half of the condition
            ("5. a&b from 1 2\n6. c from 5 3", [1, 0]),  # not what was asked for
            ("5. a&b from 1 2\n6. c from 5 9\nd from 6 4", [1, 0, 0]),  # no such line
            ("5. a&b from 1 2\n6. a from 5\n7. c from 5 3\n8. d from 7 4", [1, 0, 1, 0]),  # again
            ("5. d", [0]), ("5. d from 5 4", [0])):
        assert proofs.proof([wrong], **columns) == [0.0]
        [found] = proofs.steps([wrong], **columns)
        assert [value for _, value in found] == values, wrong
    assert proofs.steps([""], **columns) == [0.0]


def solution(premises):
    """A proof of every letter that follows."""
    lines = premises.copy()
    proof = []

    def write(formula, *used):
        if formula not in lines:
            numbers = [str(lines.index(one) + 1) for one in used]
            lines.append(formula)
            proof.append(f"{len(lines)}. {formula} from {' '.join(numbers)}")

    for rule in premises * len(premises):  # so often that each rule has its turn
        condition, arrow, new = rule.partition("->")
        parts = condition.split("&")
        if arrow and {*parts} <= {*lines}:
            write(condition, *parts)
            write(new, condition, rule)
    return "\n".join(proof)


def test_every_task_of_proofs_has_a_solution_and_none_is_in_both_splits():
    rows = {split: data.load(f"{proofs.__file__}:make", split, 200) for split in ("train", "test")}
    for row in rows["train"]:
        columns = {"answer": [row["answer"]], "premises": [row["premises"]]}
        text = solution(row["premises"])
        lines = text.splitlines()
        place = next(i for i, line in enumerate(lines) if f" {row['answer']} from" in line)
        assert proofs.proof(["\n".join(lines[:place + 1])], **columns) == [1.0]
    questions = [{row["question"] for row in part} for part in rows.values()]
    assert not set.intersection(*questions)


# ---- examples/process_model.py

SUM = "14+2+9"
RIGHT = "<think>14+2=16\n16+9=25</think><answer>25</answer>"
WRONG = "<think>14+2=17\n17+9=26</think><answer>26</answer>"


def answers(tokenizer, *texts):
    """Rollouts with their verdict, and their examples."""
    example = {"question": SUM, "answer": "25"}
    prompt = data.encode(example, tokenizer, "chat")
    rollouts = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        r = nr.Rollout(prompt, ids, text, False, [0.0] * len(ids))
        r.parts = {"gsm8k": float(text == RIGHT)}
        rollouts.append(r)
    return rollouts, [example] * len(texts)


def test_a_step_is_labelled_by_the_share_of_its_continuations_that_are_right(llm, tokenizer):
    """Of the bundled model, which goes on with the total that is there."""
    rollouts, examples = answers(tokenizer, RIGHT, WRONG, "", "<think></think><answer>3</answer>")
    process_model.find_steps(rollouts, examples, tokenizer)
    assert [[value for _, value in r.steps] for r in rollouts] == [[1, 1, 1], [0, 0, 0], [0], [0]]
    with nr.rewards.Verifier("gsm8k") as verifier:
        run = SimpleNamespace(cfg=make_config(), llm=llm, verifier=verifier)
        labels = process_model.label_steps(run, rollouts, examples, 8)
    assert list(map(len, labels)) == [3, 3, 1, 1]
    assert min(labels[0]) > 0.7 and max(labels[1]) < 0.3 and labels[2:] == [[0.0], [0.0]]


def test_a_prm_learns_what_its_labels_say_and_has_read_the_last_token_of_a_step(group):
    torch.manual_seed(0)
    model = process_model.Critic(make_config(), lr=3e-3)
    rollouts = []
    for i in range(512):  # a step is right if its last token is 5
        ends = [5 if i & 1 else 6, 5 if i & 2 else 6]
        completion = [i % 50, ends[0], (3 * i) % 50, ends[1], 256]
        r = nr.Rollout([40, 41], completion, "", False, [0.0] * 5)
        r.steps = [(2, float(ends[0] == 5)), (5, float(ends[1] == 5))]
        rollouts.append(r)
    labels = [[0.9 * value for _, value in r.steps] for r in rollouts]
    assert process_model.fit(model, rollouts, labels) == 1.0
    alone = torch.cat([process_model.step_logits(model, [r]) for r in rollouts[:5]])
    close(process_model.step_logits(model, rollouts[:5]), alone, 1e-4)


# ---- examples/shared_critic.py and four_models.py

class Engine(torch.nn.Module):
    """What DeepSpeed's engine is for a Head: a module around TokenLogps."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, pack):
        return self.module(pack)


def test_a_value_is_the_heads_product_with_the_policys_hidden_state(group, tokenizer):
    cfg = make_config()
    policy = Engine(nr.TokenLogps(nr.load_model(cfg)))
    head = shared_critic.Head(policy)
    torch.nn.init.normal_(head.linear.weight)
    rollouts = fixed_rollouts(tokenizer)
    groups = nr.in_groups(rollouts, 4)
    run = SimpleNamespace(cfg=cfg, policy=policy)
    shared_critic.assign_advantages(run, head, groups, lam=1.0)
    for r in rollouts:  # with gamma and lambda 1, each token's return is the reward
        close(r.extra["returns"], [r.reward] * r.length, 1e-5)
    flat = torch.tensor(nr.flatten(r.advantages for r in rollouts))
    assert abs(flat.mean()) < 1e-5 and abs(flat.std() - 1) < 1e-2
    first, pack = rollouts[1], nr.collate(rollouts)
    policy(pack)
    found = head.values(pack).split(pack.lengths.tolist())[1]  # (R,)
    model = policy.module.model
    model.set_attn_implementation("eager")
    ids = torch.tensor([first.prompt + first.completion])
    hidden = model(ids, output_hidden_states=True).hidden_states[-1]  # (1, L, H)
    close(found, head.linear(hidden[0, len(first.prompt) - 1:-1])[:, 0], 1e-4)


def test_the_value_loss_trains_the_head_and_the_layers_that_it_shares(
        group, tokenizer, monkeypatch):
    """With advantages of 0 nothing but the value loss has a gradient."""
    stages = {}
    monkeypatch.setattr(nr, "train", lambda run, **given: stages.update(given))
    cfg = make_config(kl_coef=0.0, correction="none", mismatch_bound=1e9)
    changes = []
    for vf_coef in (0.0, 0.1):
        policy = nr.make_policy(cfg)
        run = SimpleNamespace(cfg=cfg, policy=policy)
        shared_critic.train(run, SimpleNamespace(lam=1.0, vf_coef=vf_coef))
        rollouts = fixed_rollouts(tokenizer)
        stages["assign_advantages"](nr.in_groups(rollouts, 4), cfg, 0.0)
        for r in rollouts:
            r.advantages = [0.0] * r.length
        before = dict(policy.module.model.named_parameters())
        before = {name: p.detach().clone() for name, p in before.items()}
        for _ in range(2):  # the head begins at 0: the layers get a gradient after its first step
            metrics = nr.update(policy, [nr.collate(rollouts)], cfg, stages["policy_loss"])
        assert metrics["value_loss"] > 0
        changes.append(max((p - before[name]).abs().max().item()
                           for name, p in policy.module.model.named_parameters()))
    assert changes[0] == 0 < changes[1]


def test_four_models_need_a_weight_for_the_kl(monkeypatch):
    monkeypatch.setattr(nr, "Sampler", lambda cfg: "made")
    assert four_models.make_sampler(make_config(kl_coef=0.05)) == "made"
    with pytest.raises(RunError, match="needs --kl_coef above 0"):
        four_models.make_sampler(make_config(kl_coef=0.0))


@pytest.mark.long
@pytest.mark.parametrize("name, more, keys", [
    ("four_models", "--questions 16", ["ppo/beta", "critic/explained", "reward_model/agreement"]),
    ("process_model", "--questions 16", ["prm/agrees"]),
    ("shared_critic", "--minibatches 2", ["value_loss", "clip_ratio"]),
    ("quantised", "--bits nf4", ["grad_norm"]),
    ("preferences", "--loss kto", ["preference/loss"])])
def test_the_file_trains(name, more, keys, tmp_path):
    flags = "--steps 2 --prompts 4 --samples 4 --eval_size 8 --eval_every 2 --save_every 0"
    command = [sys.executable, "-m", f"examples.{name}", *flags.split(), *more.split(), "--out",
               str(tmp_path), "--name", "run"]
    subprocess.run(command, cwd=ROOT, env=ENV, check=True)
    *_, row, last = read_rows(tmp_path / "run/metrics.jsonl")
    assert last["step"] == 2 and row.keys() >= {*keys}


# ---- bench/compute_share.py

def run_folder(tmp_path, name, **changes):
    """A run of two steps with three evaluations, as the script writes it."""
    folder = tmp_path / name
    folder.mkdir()
    config = make_config(**changes)
    about = {"config": vars(config) | {"dtype": "float32"}}
    (folder / "config.json").write_text(json.dumps(about))
    step = {"tokens": 1000, "trained": 0.5, "seconds/rollout": 1.0}
    write_rows(folder / "metrics.jsonl", [
        {"step": 0, "eval/accuracy": 0.5} | step, {"step": 1, "eval/accuracy": 0.75} | step,
        {"step": 2, "eval/accuracy": 0.7}])
    return str(folder)


def test_the_share_of_rl_counts_2_flops_per_weight_and_token_of_a_pass(tmp_path, capsys):
    run = run_folder(tmp_path, "rl", kl_coef=0.0)
    with_ref = run_folder(tmp_path, "ref", kl_coef=0.1)
    compute_share.main([run, with_ref])
    first, second = capsys.readouterr().out.split("\n\n")
    rows = [re.split(r" *\| *", line)[1:-1] for line in first.splitlines()[2:]]
    weights = 822_272
    sampling = 2 * weights * 2000
    assert [float(row[1]) for row in rows] == pytest.approx([0, sampling, sampling], rel=0.01)
    cold = compute_share.cold_start_flops()
    updates = [cold, 6 * weights * 1000, 8 * weights * 1000]
    assert [float(row[2]) for row in rows] == pytest.approx(updates, rel=0.01)
    assert sum(float(row[3][:-1]) for row in rows) == pytest.approx(100, abs=0.1)
    assert "| 0 to 1 | +25.0 |" in second and "| 1 to 2 | -5.0 |" in second
    longest = 2000 * 128 * 6 * weights * 110  # tokens of an example: at most 20 + 90
    assert longest / 10 < cold < longest


# ---- examples/quantised.py

NF4 = [-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0, 0.0795803,
       0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1]  # appendix E


def test_the_levels_of_nf4_are_those_of_the_paper():
    close(quantised.LEVELS["nf4"], NF4, 1e-5)


@pytest.mark.parametrize("bits", quantised.LEVELS)
def test_a_rounded_weight_is_the_nearest_level_of_its_block(bits):
    torch.manual_seed(0)
    levels = quantised.LEVELS[bits]
    weight = torch.randn(6, 128)
    codes, scales = quantised.quantise(weight, levels)
    assert codes.dtype == torch.uint8 and codes.shape == (12, 64 if bits == "int8" else 32)
    blocks = weight.view(12, 64)
    choices = levels * blocks.abs().amax(1)[:, None, None]  # (12, 1, levels)
    distances = (blocks[:, :, None] - choices).abs()  # (12, 64, levels)
    found = quantised.dequantise(codes, scales, levels)
    close((blocks - found).abs(), distances.amin(2), 1e-5)


def test_vllm_gets_the_rounded_weights_with_the_adapters_on_top(group):
    cfg = make_config(lora_rank=8)
    policy = nr.TokenLogps(nr.load_model(cfg))
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.01)
    layers = {name: layer for name, layer in policy.model.named_modules()
              if hasattr(layer, "lora_A")}
    before = {name: layer.base_layer.weight.detach().clone() for name, layer in layers.items()}
    plain = dict(trainer.named_weights(SimpleNamespace(module=policy)))
    levels = quantised.LEVELS["nf4"]
    size, error = quantised.quantise_model(policy.model, levels)
    assert size == 4.5 and 0.05 < error < 0.15  # 4 bits, and a scale of 32 per 64 weights
    rounded = dict(trainer.named_weights(SimpleNamespace(module=policy)))
    assert rounded.keys() == plain.keys() and len(layers) == 28
    for name, layer in layers.items():
        wanted = quantised.dequantise(*quantised.quantise(before[name], levels), levels)
        delta = layer.get_delta_weight("default")
        close(rounded[f"{name}.weight"], wanted.view_as(delta) + delta, 1e-5)
        x = torch.randn(3, delta.shape[1])
        bias = 0 if layer.base_layer.bias is None else layer.base_layer.bias
        close(layer(x), x @ rounded[f"{name}.weight"].T + bias, 1e-4)
    others = rounded.keys() - {f"{name}.weight" for name in layers}
    assert others and all(torch.equal(rounded[key], plain[key]) for key in others)


def test_an_update_moves_the_adapters_and_not_the_codes(group, tokenizer):
    cfg = make_config(lora_rank=8, kl_coef=0.0)
    policy = nr.make_policy(cfg)
    quantised.quantise_model(policy.module.model, quantised.LEVELS["int4"])
    before = dict(trainer.named_weights(policy))
    layer = next(x for x in policy.modules() if isinstance(x, quantised.Quantised))
    codes = layer.codes.clone()
    metrics = nr.update(policy, [nr.collate(fixed_rollouts(tokenizer))], dataclasses.replace(
        cfg, correction="none", mismatch_bound=1e9))
    after = dict(trainer.named_weights(policy))
    assert metrics["grad_norm"] > 0 and torch.equal(layer.codes, codes)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(moved) == 28


# ---- learn/dpo.py

def test_dpo_ends_at_the_policy_that_is_best_for_rlhf():
    best, _ = dpo.best_policy()
    close(dpo.train(), best, 1e-3)
    rng = torch.Generator().manual_seed(0)
    for _ in range(100):
        other = torch.rand(5, generator=rng, dtype=torch.float64)
        assert dpo.objective(other / other.sum()) <= dpo.objective(best)
    close(dpo.preferences(dpo.reward_of(best)), dpo.preferences(dpo.REWARDS))


# ---- examples/own_questions.py

def test_questions_are_kept_that_are_unlike_those_before():
    kept = own_questions.choose([
        "What is the capital of France?", "what is the capital of Spain?", "Hi there",
        " Why do owls sleep by day? ", "Write a poem about the capital of a country."])
    assert kept == ["What is the capital of France?", "Why do owls sleep by day?",
                    "Write a poem about the capital of a country."]


def test_a_model_goes_on_after_the_opening_of_a_users_turn(llm, tokenizer):
    assert tokenizer.decode(own_questions.opening(tokenizer, "chat")) == "<|user|>"
    run = SimpleNamespace(cfg=make_config(), llm=llm)
    asked = nr.rollout(llm, [own_questions.opening(tokenizer, "chat")], 1, 0.0, 8)
    assert asked[0].prompt == tokenizer.encode("<|user|>")
    rows = own_questions.make(run, 16)  # a model that was never shown how to ask
    assert all(len(row["question"].split()) >= own_questions.LEAST for row in rows)
