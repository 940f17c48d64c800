"""What others need to use the model in final/: a chat template, sampling settings and a card."""
from pathlib import Path

import data
from runtime.report.text import evaluation_text

CARD = Path(__file__).with_name("model_card.md")


def write_card(final, cfg, tokenizer, provenance, rows):
    """Writes the chat template, generation_config.json and the model card README.md into `final`.

    provenance: the content of the run's config.json. rows: the dicts of metrics.jsonl, at least one
    of them with an evaluation."""
    _write_chat_template(final, cfg, tokenizer)
    _write_generation_config(final, cfg, tokenizer)
    evaluations = [row for row in rows if "eval/accuracy" in row]
    base = ""
    if not Path(cfg.model).is_dir():  # the hub shows which of its models this one is made from
        base = f"\nbase_model: {cfg.model}"
    prompt = data.encode({"question": "{question}"}, tokenizer, cfg.template)
    versions = [f"{name} {version}" for name, version in provenance["versions"].items()]
    fields = provenance | vars(cfg) | {
        "base": base,
        "data": cfg.data or cfg.task,
        "first": _accuracy(evaluations[0]),
        "last": _accuracy(evaluations[-1]),
        "prompt": tokenizer.decode(prompt),
        "versions": ", ".join(versions),
    }
    text = CARD.read_text().format(**fields)
    (final / "README.md").write_text(text)


def _accuracy(row):
    """One evaluation of a run as text."""
    return f"step {row['step']}, {evaluation_text(row)}"


def _write_chat_template(final, cfg, tokenizer):
    """Makes the run's --template the chat template of the model in `final`."""
    if cfg.template == "chat":  # the tokenizer has it
        return
    prompt = data.TEMPLATES.get(cfg.template, cfg.template)
    bos = tokenizer.decode(data.added_prefix(tokenizer))  # added to a text, but not to a chat
    prompt = bos + prompt.removeprefix(bos)
    question = "messages[-1]['content']"
    template = f"{ascii(prompt)}.replace('{{question}}', {question})"
    (final / "chat_template.jinja").write_text("{{ " + template + " }}")


def _write_generation_config(final, cfg, tokenizer):
    """Writes the run's sampling settings and stop tokens: those of rollout in nano_rlvr.py."""
    from transformers import GenerationConfig
    stop = GenerationConfig.from_pretrained(final).eos_token_id or []  # an int or a list
    stop = set(stop) if isinstance(stop, list) else {stop}
    stop.add(tokenizer.eos_token_id)
    stop.add(tokenizer.get_vocab().get("<|im_end|>"))  # ends a ChatML turn
    settings = GenerationConfig(
        do_sample=True,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=0,
        max_new_tokens=cfg.max_tokens,
        eos_token_id=sorted(stop - {None}),
        pad_token_id=tokenizer.pad_token_id)
    settings.save_pretrained(final)
