"""The report: its charts, its rollouts, and how the page behaves in headless Chromium."""
import html
import itertools
import json
import math
import random
import re

import pytest
import torch

import nano_rlvr as nr
import runtime.report.__main__
import runtime.report.page
from bench import screenshots
from conftest import EPS, fixed_rollouts, make_config, within, write_rows
from runtime import records
from runtime.log import Log

SCRIPT = "<script>alert(1)</script><img src=x onerror=\"document.title='read as HTML'\"> & </pre>"
STEPS, GROUPS, SAMPLES = 6, 3, 4
METRICS = (  # of a step
    "reward/a reward/b eval/pass@2 grad_norm loss kl entropy completion/length mismatch/max mfu "
    "completion/truncated group/zero_std mismatch/mean_abs seconds/rollout seconds/update").split()
# added to a copy of a report: it goes through states of the page and leaves what it sees
VISITOR = r"""<script>
const all = (name, node = document) => [...node.querySelectorAll(name)];
function point(svg, event) {  // at 0.6 of the chart's steps
  const box = svg.getBoundingClientRect();  // of which drawChart leaves 46 + 12 pixels free
  const clientX = box.left + 46 + 0.6 * (box.width - 58);
  svg.dispatchEvent(new PointerEvent(event, {clientX, clientY: box.top + 20}));
}
addEventListener("load", async () => {
  while (!runs) await new Promise(done => setTimeout(done, 10));
  const seen = [];
  for (const address of STATES) {
    const [where, key] = address.split(" ");
    if (address === "click") point(charts[1].svg, "click");
    else if (key) ({plot: charts[1].svg, row: $("rows").lastChild, token: all("#group pre")[1]})[
      where].dispatchEvent(new KeyboardEvent("keydown", {key}));
    else location.hash = address;
    await new Promise(done => setTimeout(done, 50));
    for (const {svg} of charts) point(svg, "pointermove");
    seen.push({
      count: $("count").textContent, prompt: $("prompt").textContent, title: document.title,
      rows: $("rows").children.length, scripts: document.scripts.length,
      legend: $("legend").textContent, question: $("question").textContent,
      chips: all("#chips button").map(button => button.textContent), token: $("token").textContent,
      hash: location.hash,
      live: $("live").textContent, group: $("group-title").textContent,
      numbers: all("#charts pre")[0].textContent, metrics: all("#charts option").map(o => o.value),
      verdict: $("verdict").textContent, wide: document.documentElement.scrollWidth - innerWidth,
      colors: ["color", "backgroundColor"].map(name => getComputedStyle(document.body)[name]),
      charts: all("#charts figure").map((figure, i) => ({
        lines: charts[i].drawn.map(({name, color, dash}) => [name, color, dash]),
        title: all("b", figure)[0].textContent, tip: all(".tip", figure)[0].innerText,
        hint: all("details", figure)[0]?.textContent, marks: all(".chosen", figure).length})),
      cards: [...$("group").children].map(card => ({
        box: card.getBoundingClientRect(), match: card.classList.contains("match"),
        text: all("pre", card)[0].textContent, spans: all("pre > span", card).map(
          s => [s.textContent, s.className, Number(s.style.getPropertyValue("--a"))])}))});
  }
  parent.postMessage(seen, "*");
});
</script>"""
FRAME = """<iframe src="visited.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe>
<pre id="seen"></pre><script>
onmessage = ({data}) => { document.getElementById("seen").textContent = JSON.stringify(data); }
</script>"""


def write_run(folder, length=5, seed=0):
    """A run folder with random numbers; every other completion has SCRIPT. Returns its rollouts."""
    rng = random.Random(seed)
    folder.mkdir()
    config = {"seed": seed, "steps": STEPS, "samples": SAMPLES, "name": folder.name}
    (folder / "config.json").write_text(json.dumps(
        {"config": config, "command": f"nano_rlvr.py {SCRIPT} --data a\udcff.jsonl", "commit": "c",
         "device": "d"}))
    metrics, rollouts, answers = [], [], []
    for step in range(STEPS + 1):
        metrics.append({"step": step, "eval/accuracy": 0.5 + 0.4 * step / STEPS, "eval/low": 0.4,
                        "eval/high": 0.95})
        if step < STEPS:
            metrics[-1] |= dict.fromkeys(METRICS, 0.5) | {
                "reward/mean": rng.random(), "my/bonus": 10 * step, "my/note": "text", "lr": None}
        answers += [{"step": step, "question": f"{i}? {SCRIPT}", "answer": str(i), "finish": "stop",
                     "right": step > i, "completion": f"{i} {SCRIPT}"} for i in range(2)]
        for i in range(GROUPS * SAMPLES if step < STEPS else 0):
            x = [round(rng.uniform(-1, 1), 2) for _ in range(length)]
            texts = [f"{number} " for number in x[:-1]] + [SCRIPT if i % 2 else "<|end|>"]
            numbers = {"text": texts, "logp": [-abs(number) for number in x], "change": x,
                       "gap": x[::-1]}
            numbers["logp"][1] = numbers["change"][1] = numbers["gap"][1] = None  # of a tool
            reward = [0.0, 1.0, None, 0.5][i % 4]
            rollouts.append({"step": step, "prompt": f"prompt {i // SAMPLES} {SCRIPT}",
                             "completion": "".join(texts), "reward": reward,
                             "parts": {"a": reward, "b": 1.0}, "advantage": 2 * (reward or 0) - 1,
                             "tokens": len(texts), "finish": "length" if i % 3 == 2 else "stop",
                             "per_token": numbers})
    write_rows(folder / "metrics.jsonl", metrics)
    write_rows(folder / "rollouts.jsonl", rollouts)
    write_rows(folder / "eval.jsonl", answers)
    return rollouts


def visit(page, states, width=1280, dark=False, visitor=VISITOR):
    """What the page shows in these states, a dict per state, in a frame of `width` pixels."""
    if not screenshots.CHROMIUM:
        pytest.skip("no chromium: apt-get install chromium")
    visitor = visitor.replace("STATES", json.dumps(states))
    text = page.read_text().replace("</body>", visitor + "</body>")
    (page.parent / "visited.html").write_text(text)
    frame = page.parent / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    dom = screenshots.browse(frame.as_uri(), "--window-size=1400,1000", "--dump-dom", dark=dark)
    [seen] = re.findall(r'<pre id="seen">(.*)</pre>', dom, re.S)
    return json.loads(html.unescape(seen))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    rollouts = write_run(folder)
    runtime.report.page.write([folder], folder / "report.html")
    return folder / "report.html", rollouts


STATES = {  # what can stand behind # in the address -> which rollouts the page then shows
    "": lambda r: True,
    "finish=length": lambda r: r["finish"] == "length",
    "min=0.5": lambda r: r["reward"] is not None and r["reward"] >= 0.5,
    "step=2&min=0.5&max=0.5": lambda r: r["step"] == 2 and r["reward"] == 0.5,
    "step=4&group=4:1": lambda r: r["step"] == 4,
    "find=PROMPT%202&step=1": lambda r: r["step"] == 1 and r["prompt"].startswith("prompt 2"),
    "step=4&find=nowhere": lambda r: False,
    "color=advantage": lambda r: True, "color=gap": lambda r: True, "color=logp": lambda r: True,
    "click": lambda r: r["step"] == 3}  # on the chart of the reward, at 0.6 of the steps 0 to 5


@pytest.fixture(scope="module")
def seen(one):
    return dict(zip(STATES, visit(one[0], list(STATES))))


def test_a_filter_shows_the_rollouts_that_it_names_and_a_script_in_a_text_stays_text(one, seen):
    for state, is_shown in STATES.items():
        found, what = [r for r in one[1] if is_shown(r)], seen[state]
        groups = {(r["step"], r["prompt"]) for r in found}
        none = ": none has step 4 and text nowhere; take a filter back" * (not found)
        assert what["count"].startswith(f"{len(found)} of {STEPS * GROUPS * SAMPLES} rollouts, "
                                        f"in {len(groups)} groups{none};"), state
        assert what["rows"] == min(len(groups), 12)
        assert what["title"] == "run" and what["scripts"] == 2  # that of the page and VISITOR
        assert any(card["text"].endswith(SCRIPT) for card in what["cards"]) == bool(found)
        assert (SCRIPT in what["prompt"]) == bool(found)
        assert what["question"].count(SCRIPT) == 3  # the question, its first and last answer
        assert "at the evaluations of step0123456" in what["question"]
    cards = seen["min=0.5"]["cards"]  # a filter marks its rollouts in the group
    assert [card["match"] for card in cards] == [False, True, False, True]
    assert seen["step=4&find=nowhere"]["chips"] == ["step 4 ×", "text nowhere ×"]


def test_the_whole_group_of_a_prompt_is_side_by_side(one, seen):
    group = [r for r in one[1] if r["step"] == 4][SAMPLES:2 * SAMPLES]
    assert (what := seen["step=4&group=4:1"])["prompt"] == group[0]["prompt"]
    assert [card["text"] for card in what["cards"]] == [r["completion"] for r in group]
    assert len({card["box"]["top"] for card in what["cards"]}) == 1  # in one row
    assert len({card["box"]["left"] for card in what["cards"]}) == SAMPLES


def test_the_color_of_a_token_has_the_sign_and_the_size_of_its_number(one, seen):
    for color in ("advantage", "change", "gap", "logp"):
        what = seen["" if color == "change" else f"color={color}"]  # the change comes first
        most = float(re.search(r"−([\d.]+) or less", what["legend"])[1])
        assert ("or more" in what["legend"]) == (color != "logp")  # a log-prob is at most 0
        for card, r in zip(what["cards"], one[1][:SAMPLES]):
            numbers = r["per_token"].get(color, [r["advantage"]] * r["tokens"])
            assert [text for text, _, _ in card["spans"]] == r["per_token"]["text"]
            assert card["spans"].pop(1)[1] == "unsampled"
            for (_, name, alpha), x in zip(card["spans"], [numbers[0], *numbers[2:]]):
                assert name == ("pos" if x > 0 else "neg" if x < 0 else "")
                # the page shows `most` with two digits and alpha with two decimals
                within(abs(alpha - min(0.75, 0.75 * abs(x) / most)), 0.75 * 0.05 + 0.005)


def test_a_chart_has_values_on_hover_and_its_hint_and_marks_the_step_of_a_click(seen):
    charts = {chart["title"]: chart for chart in seen[""]["charts"]}
    titles = [title for title, *_ in runtime.report.page.CHARTS if title != "Accuracy by set"]
    assert list(charts) == [*titles, "Any metric"]
    assert charts["Held-out accuracy"]["tip"] == "step 4\n● Held-out accuracy 76.7 % (40 % to 95 %)"
    assert charts["Reward parts"]["tip"] == "step 3\n● a 0.5\n● b 0.5"
    for title, _, _, _, hint in runtime.report.page.CHARTS:
        assert not hint or charts[title]["hint"] == "Is this normal?" + hint
        assert set(re.findall(r"--(\w+)", hint)) <= nr.Config.__dataclass_fields__.keys()
    assert {chart["marks"] for chart in seen["click"]["charts"]} == {1}
    assert "over 2 questions. 2 went wrong → right, 0 right → wrong." in seen[""]["verdict"]
    assert "10% of the completions are cut off" in seen[""]["verdict"]  # half of them


def test_the_last_chart_has_any_number_that_a_run_logged_also_one_of_a_users_own(one):
    *default, other = visit(one[0], ["", "metric=unknown", "metric=loss"])
    assert other["charts"][-1]["lines"] == [["loss", 0, 0]]
    for seen in default:  # what no other chart has comes first
        assert seen["charts"][-1]["tip"] == "step 3\n● my/bonus 30"
        rows = ["step\tmy/bonus", *(f"{i}\t{10 * i}" for i in range(STEPS))]
        assert seen["numbers"].splitlines() == rows
        assert {*seen["metrics"]} == {*METRICS, "reward/mean", "my/bonus",  # and no text
                                      "eval/accuracy", "eval/low", "eval/high"}


def test_charts_groups_and_tokens_can_be_reached_by_the_keyboard(one):
    states = ["step=5", "plot ArrowRight", "plot Enter", "row Enter", *2 * ["token ArrowRight"]]
    *_, chosen, row, token, next_token = visit(one[0], states)
    assert chosen["hash"].startswith("#step=") and chosen["hash"] != "#step=5"
    assert row["group"].endswith(f"prompt {GROUPS - 1}: its group of {SAMPLES}")
    assert token["token"].startswith("token 1 ") and token["hash"].endswith("token=1.0")
    assert next_token["token"].startswith("token 2 ") and "not sampled" in next_token["token"]


@pytest.mark.parametrize("live, age", [(1000, 0), (1000, 1e6), (0, 0)])
def test_a_page_says_how_often_it_reads_itself_again_and_when_a_run_has_gone_silent(
        live, age, one, tmp_path, monkeypatch):
    now = runtime.report.page.time.time()
    monkeypatch.setattr(runtime.report.page.time, "time", lambda: now - age)
    runtime.report.page.write([one[0].parent], tmp_path / "a.html", live=live)
    *_, seen = visit(tmp_path / "a.html", ["step=2&group=2:1&token=1.2"])
    assert seen["hash"] == "#step=2&group=2:1&token=1.2"
    assert seen["group"].startswith("Step 2, prompt 1") and seen["token"].startswith("token 3 ")
    assert ("nothing for 16667 minutes" in seen["live"]) == (age > 0)
    assert ("every 1000 seconds" in seen["live"]) == (live > 0 and not age)


def test_a_phone_scrolls_in_one_direction_is_dark_and_draws_400_tokens_of_a_long_text(
        seen, tmp_path):
    write_run(tmp_path / "long", length=410)
    runtime.report.page.write([tmp_path / "long"], tmp_path / "report.html")
    [dark] = visit(tmp_path / "report.html", [""], width=390, dark=True)
    assert dark["wide"] <= 0
    assert len({card["box"]["top"] for card in dark["cards"]}) == 1  # still side by side
    assert [len(card["spans"]) for card in dark["cards"]] == [400] * SAMPLES
    text, page, dark_text, dark_page = (
        sum(map(int, re.findall(r"\d+", color)[:3])) / 765
        for color in seen[""]["colors"] + dark["colors"])
    assert text < 0.25 < 0.75 < page and dark_page < 0.25 < 0.75 < dark_text


def test_the_page_refers_to_nothing_in_a_network_and_carries_no_text_of_a_model_as_html(one):
    page = one[0].read_text()
    assert "://" not in page.replace('"http://www.w3.org/2000/svg"', "")  # the name of SVG
    assert "alert(1)" not in page.replace(html.escape(SCRIPT), "")
    assert "default-src 'none'" in page
    assert not re.findall(r"@@\w+@@|(?:src|href)=\"(?!#)", page)
    assert r"--data a\udcff.jsonl" in page  # a name that is not UTF-8 is escaped


def test_several_runs_overlay_in_each_chart_and_what_differs_comes_first(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"run-{seed}", seed=seed)
    runs = [f"{tmp_path}/run-0", f"{tmp_path}/run-1"]
    runtime.report.__main__.main([*runs, "--out", f"{tmp_path}/all.html"])
    page = (tmp_path / "all.html").read_text()
    flags = re.findall(r"<tr><td>(\w*)<td>", page[page.index("Settings</summary>"):])
    assert flags == ["", "seed", "steps", "samples"]
    for chart in visit(tmp_path / "all.html", [""])[0]["charts"]:
        names, colors, dashes = zip(*chart["lines"])
        assert colors == (0,) * (len(names) // 2) + (1,) * (len(names) // 2)
        assert dashes == (*range(len(names) // 2),) * 2
        assert {name.split()[0] for name in names} == {"run-0", "run-1"}
    # the page finds a run by its name
    runtime.report.page.write([*runs, runs[0]], tmp_path / "all.html")
    title = re.search("<title>(.*)</title>", (tmp_path / "all.html").read_text())[1]
    assert len({*title.split(", ")}) == 3


def test_a_report_replaces_no_other_file_and_leaves_nothing_behind(tmp_path):
    write_run(tmp_path / "run")
    (precious := tmp_path / "x.html").write_text("precious")
    for name in ("report.part", "report.html"):
        (tmp_path / "run" / name).symlink_to(precious)
    runtime.report.__main__.main([str(tmp_path / "run")])
    assert precious.read_text() == "precious"
    for out in ("/dev/full", "run", "run/config.json", "nowhere/a.html"):
        with pytest.raises(SystemExit, match="--out .* must be a file that ends in .html or .png"):
            runtime.report.__main__.main([str(tmp_path / "run"), "--out", str(tmp_path / out)])
    assert [path.name for path in tmp_path.glob("**/*.part")] == ["report.part"]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "rollouts.jsonl", "eval.jsonl"])
def test_a_damaged_file_of_a_run_is_one_line_and_no_traceback(tmp_path, name):
    write_run(tmp_path / "run")
    for line in (b"no json", b"[]", b"\xff", b'{"step": "x"}', b"[" * 9**5):
        (tmp_path / "run" / name).write_bytes(line + b'\n{"step": 1}\n')
        with pytest.raises(SystemExit, match=r"\Areport: .*/run: damaged, or not .*\Z"):
            runtime.report.__main__.main([str(tmp_path / "run")])


def test_a_last_line_that_is_cut_off_is_skipped_with_a_note(tmp_path, capsys):
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 0, "reward/mean": 0.5}\n'
    for cut in (b'{"step": 1, "rew', b'{"step": 1, "name": "\xc3', b'{"step": 1e999}'):
        path.write_bytes(whole + cut)
        assert records.read(tmp_path) == [json.loads(whole)]
        assert capsys.readouterr().err == f"note: {path}:2 is cut off: skipped\n"


def test_the_report_has_whole_groups_of_at_most_2000_rollouts_in_every_kth_step():
    rng, limit = random.Random(0), records.MOST_SHOWN
    for _ in range(100):
        samples, groups, steps = rng.randint(1, 3000), rng.randint(1, 900), rng.randint(1, 400)
        per_step = min(samples * groups, max(samples, limit // samples * samples))
        rollouts = range(samples * groups)
        shown_of = records.shown_rollouts
        shown = [s for s in range(steps) if shown_of(s, rollouts, samples, steps)]
        assert shown_of(0, rollouts, samples, steps) == rollouts[:per_step]
        k = shown[1] if len(shown) > 1 else steps
        assert shown == list(range(0, steps, k))
        assert len(shown) * per_step <= limit or shown == [0]
        assert k == 1 or math.ceil(steps / (k - 1)) * per_step > limit  # not too few


@pytest.mark.numeric
def test_numbers_per_token_are_those_of_the_trainer_before_and_after_the_update(
        group, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "SHARE", 1)
    cfg = make_config(keep_rollouts=5, lr=1e-3, out=str(tmp_path), correction="none",
                      mismatch_bound=1e9, kl_coef=0.0, wandb="offline")
    rollouts = fixed_rollouts(tokenizer)
    rollouts[1].loss_mask[1:] = [False] * (len(rollouts[1].completion) - 1)
    groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
    policy, written = nr.make_policy(cfg), Log(cfg, tokenizer)

    @torch.no_grad()
    def logps():
        return [policy(nr.collate([r]))[0].tolist() for r in rollouts[:8]]  # one by one

    old = logps()
    packs = [nr.collate(rollouts)]
    nr.update(policy, packs, cfg)
    written.token_changes(0, groups, packs, policy, metrics := {})
    new = logps()
    written.write(0, metrics, groups)
    rows = records.read(written.folder, "rollouts.jsonl")
    assert len(rows) == 8 and metrics["seconds/report"] > 0  # those that are kept, in whole groups
    written.wandb.finish()
    [table] = written.folder.glob("wandb/offline-run-*/files/media/table/rollouts_*.json")
    assert json.loads(table.read_text())["data"] == [
        [row[name] for name in ("prompt", "completion", "reward", "advantage")] for row in rows]
    for row, r, x, y in zip(rows, rollouts, old, new):
        vllm = itertools.compress(r.vllm_logps, r.loss_mask)
        for name, wanted in (("logp", x), ("change", [b - a for a, b in zip(x, y)]),
                             ("gap", [a - b for a, b in zip(x, vllm)])):
            numbers = row["per_token"][name]
            assert [number is not None for number in numbers] == r.loss_mask
            for number, exact in zip(itertools.compress(numbers, r.loss_mask), wanted, strict=True):
                # two digits, five decimals; other packs
                within(abs(number - exact), 0.05 * abs(exact) + 1e-5 + 1000 * EPS)
    assert max(abs(x) for row in rows for x in row["per_token"]["change"] if x) > 0.01


def test_the_texts_of_the_tokens_are_the_text_also_where_a_character_has_several_tokens(tokenizer):
    text = "<think>1+2=3\né 漢字 🙂</think>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = records.token_texts(ids, tokenizer)
    assert "".join(pieces) == text and len(pieces) == len(ids) > len(text) - len("<think></think>")
    assert pieces[0] == "<think>" and "" in pieces and "漢" in pieces


def test_the_screen_has_a_line_per_step_and_says_where_to_look_next(
        tokenizer, tmp_path, monkeypatch, group, capsys):
    run, lines = Log(make_config(out=str(tmp_path), name="run"), tokenizer), []
    monkeypatch.setattr(run.bar, "write", lines.append)
    row = {"lr": 1e-6, "reward/mean": 0.5, "reward/unscored": 0.0, "completion/length": 99.5,
           "seconds/update": 1.5, "mfu": 0.1, "tokens": 1500, "memory/update": 2.0}
    run.write(7, row)
    assert lines.pop() == "step    7  reward  0.500  length   99.5  1.5 s"
    found = dict.fromkeys(["accuracy", "low", "high", "n", "length", "unscored"], 0.5)
    run.write(8, row | {"reward/unscored": 1.0} | {f"eval/{x}": y for x, y in found.items()})
    assert "no reward 100%" in lines.pop() and "accuracy 50.0%" in lines.pop()
    before = (page := run.folder / "report.html").stat()  # an evaluation writes the report
    run.close()
    says = "update 3 s .*; 1000 tokens/s, 10.0% MFU of the update, peak memory 2.00 GiB"
    assert re.search(says, lines.pop())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"next: open {page}; the numbers: docs/metrics.md"  # no step: no model
    # another file, not the same one filled again: a reader has a whole page
    assert page.stat().st_ino != before.st_ino and (run.folder / "curve.png").exists()


def test_a_run_whose_rewards_are_equal_says_once_since_when_and_again_after_a_gradient(
        tokenizer, tmp_path, monkeypatch, group):
    trained = [nr.Rollout([1], [2], "", False, [0.0], reward=1.0, advantages=[1.0])]
    run, lines = Log(make_config(out=str(tmp_path), name="run"), tokenizer), []
    monkeypatch.setattr(run.bar, "write", lines.append)
    for step, flat in enumerate([0.9] + [1.0] * 8 + [0.0] + [1.0] * 5):
        run.write(step, {"lr": 1.0, "group/zero_std": flat, "seconds/update": 1.0})
    for step in range(20, 30):  # a baseline that is not the group's mean: a gradient
        run.write(step, {"lr": 1.0, "group/zero_std": 1.0 - (step == 20), "seconds/update": 1.0},
                  [trained])
    said = [line.split(" since ")[1].split(":")[0] for line in lines if "no gradient" in line]
    assert said == ["step 1", "step 10"]


def test_wandb_online_with_a_wrong_key_is_refused_and_the_key_is_not_shown(
        group, monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for key, says in (("", ".*No API key"), ("sentinel", "(?!.*sentinel).*must have 40")):
        monkeypatch.setenv("WANDB_API_KEY", key)
        with pytest.raises(ValueError, match=f"^--wandb online: {says}"):
            Log(make_config(out=str(tmp_path), name="run", wandb="online"), None)
