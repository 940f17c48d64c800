"""What a run leaves for others in final/, and examples/chat.py."""
import json
import shutil

import pytest
import tokenizers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import data
import nano_rlvr as nr
from conftest import ROOT, make_config
from examples import chat
from runtime.card import write_card
from runtime.log import Log

TINY = ROOT / "models/tiny"
OWN = "Übung 1:\n'{question}' \"{question}\" {{ x }} \\frac{1}{2} \U0001f600\n:"  # of a file


def finished(out, tokenizer, **changes):
    """final/ of a run that has ended, with two evaluations."""
    run = Log(make_config(out=str(out), name="run", **changes), tokenizer)
    shutil.copytree(TINY, run.folder / "final")
    tokenizer.save_pretrained(run.folder / "final")
    for step, accuracy in ((0, 0.25), (2, 0.75)):
        run.write(step, {f"eval/{name}": accuracy for name in ("accuracy", "low", "high", "length")}
                  | {"eval/n": 8, "eval/mean@4": accuracy})
    run.close()
    return run.folder / "final"


@pytest.mark.parametrize("template", ["chat", "none", "r1", "qwen_math", OWN])
@pytest.mark.parametrize("bos", [False, True])
def test_the_chat_template_of_a_trained_model_gives_the_prompt_of_its_run(
        template, bos, group, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    if bos:  # as Llama's: added to a text, and not to a chat
        tokenizer.bos_token = "<|user|>"
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", tokenizer.bos_token_id)])
    question = {"question": "Is {{ 1 }} < 2 & '3'?\n\U0001f600 {question}"}
    before = data.encode(question, tokenizer, template)
    tokenizer = AutoTokenizer.from_pretrained(finished(tmp_path, tokenizer, template=template))
    assert data.encode(question, tokenizer, "chat") == before
    assert not bos or before.count(tokenizer.bos_token_id) == 1


def test_a_trained_model_has_a_card_and_the_sampling_of_its_run(
        group, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"<|im_end|>": 7})
    final = finished(tmp_path, tokenizer, temperature=0.75, max_tokens=50, lora_rank=4)
    head, text = (final / "README.md").read_text().split("---\n")[1:]
    assert yaml.safe_load(head) == {  # no base_model: a folder is none for the hub
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["grpo", "rlvr", "nano_rlvr"]}
    for part in ("# run", "models/tiny`", "2 steps of 4 x 4", "`gsm8k:1`", "rank 4",
                 "step 0, held-out: accuracy 25.0% (95 % interval", "step 2, held-out: accuracy 75",
                 "mean@4 75.0%", "<|user|>{question}<|assistant|>", "temperature 0.75", "torch 2."):
        assert part in text, part
    made = GenerationConfig.from_pretrained(final)
    assert (made.temperature, made.max_new_tokens, made.top_k) == (0.75, 50, 0)
    assert made.eos_token_id == [7, tokenizer.eos_token_id]
    assert f"examples.chat {final.parent}; " in capsys.readouterr().out.splitlines()[-1]
    path = final.parent / "config.json"
    about = json.loads(path.read_text())
    assert about["command"] in text and about["commit"] in text
    rows = [{"step": 0, "eval/accuracy": 1, "eval/n": 1, "eval/length": 1}]
    write_card(final, make_config(model="org/name"), tokenizer, about, rows)
    head = (final / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(head)["base_model"] == "org/name"


def test_a_chat_answers_as_the_run_did_and_as_transformers_does(
        llm, tokenizer, tmp_path, monkeypatch, capsys):
    question = "13-2-3-1+6-13"
    final = finished(tmp_path, tokenizer, temperature=0.5)
    shutil.copy(TINY / "nano_rlvr.json", final)
    lines = iter([question, "1+" * 2000, ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.main([str(tmp_path / "run"), "--eval_n", "2"])
    shown = capsys.readouterr().out
    prompt = data.encode({"question": question}, tokenizer, "chat")
    [greedy] = nr.rollout(llm, [prompt], 1, 0.0, 96)
    assert greedy.text in shown and shown.count("</answer>") >= 1
    assert "longer than --max_prompt 1536" in shown
    cfg = make_config(eval_n=2)
    assert [r.truncated for r in chat.ask(chat.load(cfg), question, cfg)] == [False] * 3
    [cut] = chat.by_transformers(chat.load(cfg), [prompt], 1, 0.0, 5)
    assert cut.truncated and cut.completion == greedy.completion[:5]
    tool = tmp_path / "tool.py"  # vLLM's rollout function
    tool.write_text("from nano_rlvr import rollout\n\ndef mine(*a, seeds=None, **s):\n"
                    "    print('by vLLM')\n    return rollout(*a, seeds=seeds, **s)\n")
    monkeypatch.setattr(nr, "Sampler", lambda cfg: llm)
    monkeypatch.setattr("builtins.input", lambda prompt, lines=iter([question, ""]): next(lines))
    chat.main([str(tmp_path / "run"), "--rollout", f"{tool}:mine"])
    shown = capsys.readouterr().out
    assert "by vLLM" in shown and greedy.text in shown
    model = AutoModelForCausalLM.from_pretrained(final)
    inputs = AutoTokenizer.from_pretrained(final).apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True)
    found = model.generate(**inputs, do_sample=False, top_p=None, temperature=None)
    assert found[0].tolist() == prompt + greedy.completion
    for argv in ([], ["--eval_n", "2"]):
        with pytest.raises(SystemExit, match="name a run or a model"):
            chat.main(argv)
