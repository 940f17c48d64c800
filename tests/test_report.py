"""The report: what it draws, which rollouts it has, and how the page behaves in headless Chromium."""
import html
import json
import random
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch

import nano_rlvr as nr
import runtime.report
from bench import screenshots
from conftest import EPS, ROOT, close, fixed_rollouts, make_config, within
from runtime import report, stats
from runtime.log import Log

in_chromium = pytest.mark.skipif(not screenshots.CHROMIUM, reason="no chromium: apt-get install chromium")
SCRIPT = "<script>alert(1)</script><img src=x onerror=\"document.title='read as HTML'\"> & </pre>"
STEPS, GROUPS, SAMPLES = 6, 3, 4
# what the test adds to a copy of a report: it goes through states of the page and leaves what it sees
VISITOR = """<script>
addEventListener("load", async () => {
  while (!runs) await new Promise(done => setTimeout(done, 10));
  const seen = [];
  for (const address of STATES) {
    location.hash = address;
    await new Promise(done => setTimeout(done, 50));
    seen.push({
      count: $("count").textContent, prompt: $("prompt").textContent, title: document.title,
      rows: $("rows").children.length, scripts: document.scripts.length,
      nodes: document.querySelectorAll("*").length,
      legend: $("legend").textContent, question: $("question").textContent,
      wide: document.documentElement.scrollWidth - innerWidth,
      hidden: ["problems", "rollouts"].filter(id => $(id).hidden),
      colors: ["color", "backgroundColor"].map(name => getComputedStyle(document.body)[name]),
      cards: [...$("group").children].map(card => ({
        box: card.getBoundingClientRect(), match: card.classList.contains("match"),
        text: card.querySelector("pre").textContent, header: card.querySelector("header").textContent,
        spans: [...card.querySelectorAll("pre > span")].map(
          s => [s.textContent, s.className, Number(s.style.getPropertyValue("--a"))])}))});
  }
  parent.postMessage(seen, "*");
});
</script>"""
FRAME = """<iframe src="visited.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe>
<pre id="seen"></pre>
<script>
onmessage = ({data}) => { document.getElementById("seen").textContent = JSON.stringify(data); }
</script>"""


# ---- runs as nano_rlvr writes them

def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, per_token=True, length=5, steps=STEPS, groups=GROUPS, samples=SAMPLES, **config):
    """A run folder with random numbers; a completion of two contains SCRIPT. Returns its rollouts."""
    rng = random.Random(config.get("seed", 0))
    folder.mkdir(parents=True)
    config = {"seed": 0, "kl_coef": 0.1, "steps": steps, "samples": samples, "name": folder.name} | config
    about = {"config": config, "command": f"nano_rlvr.py {SCRIPT}", "commit": "c", "device": "d"}
    (folder / "config.json").write_text(json.dumps(about))
    metrics, rollouts, answers = [], [], []
    for step in range(steps + 1):
        row = {"step": step, "eval/accuracy": 0.5 + 0.4 * step / steps, "eval/low": 0.4, "eval/high": 0.95}
        if step < steps:
            row |= {"reward/mean": rng.random(), "kl": rng.random(), "entropy": 1.0, "completion/length": 9.0,
                    "completion/truncated": 0.1, "group/flat": 0.2, "mismatch/mean_abs": 1e-3,
                    "mismatch/max": 1e-2, "mfu": 0.25, "seconds/rollout": 1.0, "seconds/update": 4.0}
        metrics.append(row)
        answers += [{"step": step, "set": "s", "question": f"{i}? {SCRIPT}", "answer": str(i), "reward": 1.0,
                     "right": step > i, "completion": f"{step}: {i} {SCRIPT}", "tokens": 3, "finish": "stop"}
                    for i in range(2)]
        for i in range(groups * samples if step < steps else 0):
            x = [round(rng.uniform(-1, 1), 2) for _ in range(length)]
            texts = [f"{number} " for number in x[:-1]] + [SCRIPT if i % 2 else "<|end|>"]
            numbers = {"text": texts, "logp": [-abs(number) for number in x], "change": x, "gap": x[::-1]}
            numbers["logp"][1] = numbers["change"][1] = numbers["gap"][1] = None  # a token of a tool
            reward = [0.0, 1.0, None, 0.5][i % 4]
            rollouts.append({"step": step, "prompt": f"prompt {i // samples} {SCRIPT}",
                             "completion": "".join(texts), "reward": reward, "parts": {"a": reward, "b": 1.0},
                             "advantage": 2 * (reward or 0.0) - 1, "steps": [], "tokens": len(texts),
                             "finish": "length" if i % 3 == 2 else "stop",
                             **({"per_token": numbers} if per_token else {})})
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "rollouts.jsonl", rollouts)
    write_lines(folder / "eval.jsonl", answers)
    return rollouts


def visit(page, states, width=1280, dark=False):
    """What the page shows in these states, a dict per state, in a frame of `width` pixels."""
    text = page.read_text().replace("</body>", VISITOR.replace("STATES", json.dumps(states)) + "</body>")
    (page.parent / "visited.html").write_text(text)
    frame = page.parent / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    dom = screenshots.browse(frame.as_uri(), "--window-size=1400,1000", "--dump-dom", dark=dark)
    [seen] = re.findall(r'<pre id="seen">(.*)</pre>', dom, re.S)
    return json.loads(html.unescape(seen))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(report.html of a run, its rollouts)."""
    folder = tmp_path_factory.mktemp("one") / "run"
    rollouts = write_run(folder)
    report.write([folder], folder / "report.html")
    return folder / "report.html", rollouts


# ---- the page in Chromium

@pytest.fixture(scope="module")
def states():
    """What can stand behind # in the address -> which rollouts the page then shows."""
    return {
        "": lambda r: True,
        "step=3": lambda r: r["step"] == 3,
        "finish=length": lambda r: r["finish"] == "length",
        "min=0.5": lambda r: r["reward"] is not None and r["reward"] >= 0.5,
        "max=0&finish=stop": lambda r: r["reward"] == 0 and r["finish"] == "stop",
        "step=2&min=0.5&max=0.5": lambda r: r["step"] == 2 and r["reward"] == 0.5,
        "step=4&group=4:1": lambda r: r["step"] == 4,
        "color=change": lambda r: True, "color=gap": lambda r: True, "color=logp": lambda r: True}


@pytest.fixture(scope="module")
def seen(one, states):
    """{state: what the page shows}."""
    return dict(zip(states, visit(one[0], list(states))))


@in_chromium
def test_a_script_in_the_text_of_a_model_stays_text(seen):
    for what in seen.values():
        assert what["title"] == "run" and what["scripts"] == 2  # that of the page and VISITOR
        assert any(card["text"].endswith(SCRIPT) for card in what["cards"])
        assert SCRIPT in what["prompt"]
        assert what["question"].count(SCRIPT) == 3  # the question, its first and last answer


@in_chromium
def test_a_filter_shows_the_rollouts_that_it_names(one, seen, states):
    for state, is_shown in states.items():
        shown = [r for r in one[1] if is_shown(r)]
        groups = {(r["step"], r["prompt"]) for r in shown}
        assert seen[state]["count"].startswith(
            f"{len(shown)} of {STEPS * GROUPS * SAMPLES} rollouts, in {len(groups)} groups;"), state
        assert seen[state]["rows"] == min(len(shown), 12)


@in_chromium
def test_the_whole_group_of_a_prompt_is_side_by_side(one, seen):
    group = [r for r in one[1] if r["step"] == 4][SAMPLES:2 * SAMPLES]
    what = seen["step=4&group=4:1"]
    assert what["prompt"] == group[0]["prompt"]
    assert [card["text"] for card in what["cards"]] == [r["completion"] for r in group]
    assert len({card["box"]["top"] for card in what["cards"]}) == 1  # in one row
    assert len({card["box"]["left"] for card in what["cards"]}) == SAMPLES
    cards = seen["min=0.5"]["cards"]  # a filter marks its rollouts in the group
    assert [card["match"] for card in cards] == [False, True, False, True]


@in_chromium
def test_the_color_of_a_token_has_the_sign_and_the_size_of_its_number(one, seen):
    for color in ("advantage", "change", "gap", "logp"):
        what = seen["" if color == "advantage" else f"color={color}"]
        most = float(re.search(r"\+(.*)", what["legend"])[1])
        for card, r in zip(what["cards"], one[1][:SAMPLES]):
            numbers = r["per_token"].get(color, [r["advantage"]] * r["tokens"])
            assert [text for text, _, _ in card["spans"]] == r["per_token"]["text"]
            for i, ((_, name, alpha), x) in enumerate(zip(card["spans"], numbers)):
                if i == 1:
                    assert name == "unsampled"
                else:
                    assert name == ("pos" if x > 0 else "neg" if x < 0 else "")
                    # the page shows `most` with two digits and alpha with two decimals
                    within(abs(alpha - min(0.75, 0.75 * abs(x) / most)), 0.75 * 0.05 + 0.005)


@in_chromium
def test_two_thousand_long_rollouts_are_a_small_page_in_every_state(tmp_path):
    """The bound: the charts, a page of the list, and one group of 16 with 400 tokens each."""
    write_run(tmp_path / "long", length=410, steps=125, groups=1, samples=16)
    report.write([tmp_path / "long"], tmp_path / "report.html")
    states = ["", "step=77", "finish=length&color=gap", "group=124:0&color=change", "min=1&page=5"]
    for what in visit(tmp_path / "report.html", states):
        assert " of 2000 rollouts" in what["count"] and what["rows"] == 12
        assert len(what["cards"]) == 16 and all(len(card["spans"]) == 400 for card in what["cards"])
        assert what["nodes"] < 16 * 400 + 3000


@in_chromium
def test_a_phone_scrolls_in_one_direction_and_a_dark_page_is_dark(one):
    [light], [dark] = visit(one[0], [""], width=390), visit(one[0], [""], width=390, dark=True)
    for what in (light, dark):
        assert what["wide"] <= 0
        assert len({card["box"]["top"] for card in what["cards"]}) == 1  # the group is still side by side
    brightness = [[sum(map(int, re.findall(r"\d+", color)[:3])) / 765 for color in what["colors"]]
                  for what in (light, dark)]
    (text, page), (dark_text, dark_page) = brightness
    assert text < 0.25 < 0.75 < page and dark_page < 0.25 < 0.75 < dark_text


@in_chromium
def test_a_run_without_numbers_per_token_and_an_evaluation_alone_are_shown(tmp_path):
    write_run(tmp_path / "old", per_token=False)
    report.write([tmp_path / "old"], tmp_path / "report.html")
    plain, changed = visit(tmp_path / "report.html", ["", "color=change"])
    assert plain["cards"][0]["spans"][0][1] == "neg" and plain["count"].startswith("72 of 72")
    assert "no such numbers" in changed["legend"] and changed["cards"][0]["spans"][0][1] == ""
    write_lines(tmp_path / "old/metrics.jsonl", [
        {"step": 0, "eval/accuracy": 0.5, "eval/low": 0.4, "eval/high": 0.6}])
    for name in ("rollouts.jsonl", "eval.jsonl"):
        (tmp_path / "old" / name).unlink()
    report.write([tmp_path / "old"], tmp_path / "report.html")
    assert visit(tmp_path / "report.html", [""])[0]["hidden"] == ["problems", "rollouts"]


# ---- charts

def test_the_page_refers_to_nothing_in_a_network_and_carries_no_text_of_a_model_as_html(one):
    page = one[0].read_text()
    assert "://" not in page and "alert(1)" not in page.replace(html.escape(SCRIPT), "")
    assert "default-src 'none'" in page
    assert not re.findall(r"@@\w+@@|(?:src|href)=\"(?!#)", page)


def test_runs_that_differ_only_in_the_seed_are_one_line_with_a_band(tmp_path):
    folders = [tmp_path / f"default-{seed}" for seed in range(3)]
    for seed, folder in enumerate(folders):
        write_run(folder, seed=seed)
    write_run(tmp_path / "other", seed=7, kl_coef=0.5)
    runs = list(map(report.read_run, [*folders, tmp_path / "other"]))
    lines = report.lines_of(runs)
    assert {label: [run["name"] for run in of] for label, of in lines.items()} == {
        "kl_coef 0.1 (3 seeds)": [folder.name for folder in folders], "other (kl_coef 0.5)": ["other"]}
    assert list(report.lines_of(runs[:3])) == ["default (3 seeds)"]

    axis = runtime.report.figure().subplots()
    report.draw(axis, lines, "reward/mean")
    values = [[row["reward/mean"] for row in run["rows"][:-1]] for run in runs]
    mean, low, high = zip(*(stats.mean_interval(x) for x in zip(*values[:3])))
    close(axis.lines[0].get_ydata(), mean)
    close(axis.lines[1].get_ydata(), values[3])
    [band] = axis.collections
    edges = band.get_paths()[0].vertices
    close([edges[:, 1].min(), edges[:, 1].max()], [min(low), max(high)])


def test_several_runs_overlay_in_each_chart(tmp_path):
    for name, kl_coef in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / name, kl_coef=kl_coef)
    assert report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "ab.html")]) is None
    figures = re.findall(r"<figure>.*?</figure>", (tmp_path / "ab.html").read_text(), re.S)
    titles = [re.search("<b>(.*?)</b>", figure)[1] for figure in figures]
    assert titles == ["Reward", "Held-out accuracy", "KL to the starting model", "Entropy", "Length",
                      "Truncated and flat", "Mismatch", "Seconds per step: a (kl_coef 0.1)",
                      "Seconds per step: b (kl_coef 0.2)"]
    for figure in figures[:7]:
        assert figure.count("stroke: var(--c0)") == figure.count("stroke: var(--c1)") >= 1
        assert not re.search("#[0-9a-f]{6}", figure)  # every color is one of the page's


def test_the_stage_times_stand_against_the_update_s_flops_at_peak_speed(tmp_path):
    write_run(tmp_path / "run")
    axis = runtime.report.figure().subplots()
    report.draw_stages(axis, [report.read_run(tmp_path / "run")])
    close(axis.lines[0].get_ydata(), [0.25 * 4.0] * STEPS)  # mfu * seconds/update
    tops = [of.get_paths()[0].vertices[:, 1].max() for of in axis.collections]
    close(tops, [1.0, 1.0, 5.0, 5.0])  # rollout 1 s, update 4 s


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / "run" / name).unlink()
        with pytest.raises(ValueError, match=f"{tmp_path}/run is not the folder of a run: it has no {name}$"):
            report.main([str(tmp_path / "run")])


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """command("report", argv) -> what `python -m runtime.report` prints on stderr; "" = it has written."""
    def command(name, argv):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
        try:
            runpy.run_path(str(ROOT / "runtime" / f"{name}.py"), run_name="__main__")
        except SystemExit as e:
            return str(e.code)
        finally:
            capsys.readouterr()
        return ""
    return command


def without(key):
    return lambda text: text.replace(f'"{key}"', '"other"')


DAMAGES = {  # file -> [(what happens to its text, a part of the line; "" = a report of what is left)]
    "metrics.jsonl": [
        (lambda text: "", ""), (lambda text: text[:len(text) // 2], ""),
        (lambda text: "\xff\n" * 9, "metrics.jsonl:1: not a line of JSON"),
        (lambda text: "[" * 100_000 + "\n{}", "metrics.jsonl:1: not a line of JSON"),
        (lambda text: "[]", "metrics.jsonl:1: no object with a step"),
        (without("step"), "metrics.jsonl:1: no object with a step"),
        (lambda text: text.replace('"step": ', '"step": "x", "other": '), ":1: no object with a step"),
        (lambda text: text.replace('"kl": ', '"kl": [], "other": '), ":1: a metric is no number"),
        (without("eval/low"), "has no 'eval/low'"), (without("seconds/update"), "has no 'seconds/update'")],
    "rollouts.jsonl": [
        (lambda text: "", ""), (lambda text: text[:-9], ""), (without("step"), ":1: no object with a step"),
        (lambda text: "\xff\n" * 9, "rollouts.jsonl:1: not a line of JSON"),
        (lambda text: "null", "rollouts.jsonl:1: no object with a step")],
    "eval.jsonl": [
        (lambda text: "", ""), (lambda text: text[:-9], ""), (without("question"), "has no 'question'"),
        (lambda text: "\xff\n" * 9, "eval.jsonl:1: not a line of JSON"),
        (lambda text: "1\n" + text, "eval.jsonl:1: no object with a step")],
    "config.json": [
        (damage, "config.json is not as a run writes it") for damage in (
            lambda text: "", lambda text: text[:-9], lambda text: "\xff", lambda text: "[]",
            lambda text: '{"config": []}', lambda text: "[" * 100_000, without("config"), without("samples"),
            lambda text: text.replace('"samples": 4', '"samples": 0'),
            lambda text: text.replace('"samples": 4', '"samples": "many"'))],
}


@pytest.mark.parametrize("file", DAMAGES)
def test_a_damaged_file_of_a_run_is_one_line_that_names_it(tmp_path, command, file):
    write_run(tmp_path / "run", steps=2)
    path = tmp_path / "run" / file
    whole = path.read_text()
    for damage, says in DAMAGES[file]:
        path.write_text(damage(whole), "latin-1")  # 0xff is no UTF-8
        for name in ("report", "curve") if file == "metrics.jsonl" else ("report",):
            line = command(name, [tmp_path / "run"])
            if (name, says) != ("curve", "has no 'seconds/update'"):  # which the curve does not show
                assert says in line and bool(says) == bool(line) and "\n" not in line, (name, says, line)


def test_a_run_may_have_a_name_that_html_matplotlib_or_the_page_reads_otherwise(tmp_path, command):
    write_run(tmp_path / "@@DATA@@", steps=1)
    assert command("report", ["@@DATA@@"]) == ""
    page = (tmp_path / "@@DATA@@/report.html").read_text()
    assert "<h1>@@DATA@@</h1>" in page and page.count("<figure>") == 8
    write_run(tmp_path / r"$\frac$", steps=1)
    assert command("curve", [r"$\frac$"]) == ""


def test_a_picture_of_several_runs_is_not_written_over_a_file_that_nobody_named(tmp_path, command):
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=1)
    for name, file in (("curve", "curve.png"), ("report", "report.html")):
        assert command(name, ["a"]) == "" and not (tmp_path / file).exists()
        (tmp_path / file).write_text("mine")
        assert command(name, ["a", "b"]) == f"{name}: {file} is here already; --out names another file"
        assert (tmp_path / file).read_text() == "mine"
        assert command(name, ["a", "b", "--out", file]) == "" and (tmp_path / file).stat().st_size > 5000
        (tmp_path / file).unlink()
        assert command(name, ["a", "b"]) == "" and (tmp_path / file).stat().st_size > 5000


def test_the_menu_of_changes_begins_with_all_and_wrong_to_right():
    """As pairs: a JavaScript object would have its keys 10 and 11 before all others."""
    menu = json.loads(re.search("const CHANGES = (.*);", report.TEMPLATE.read_text())[1])
    assert [value for value, _ in menu] == ["", "01", "10", "11", "00"]


# ---- which rollouts, and their numbers

def test_every_kth_step_has_numbers_and_the_report_has_whole_groups_of_at_most_2000_rollouts(tmp_path):
    rng = random.Random(0)
    for _ in range(12):
        samples, groups, steps = rng.randint(2, 40), rng.randint(1, 9), rng.randint(1, 400)
        cfg = make_config(samples=samples, steps=steps, keep_rollouts=samples * groups, prompts=groups)
        sampled = [[object()] * samples] * (groups + 1)  # more than are kept
        with_numbers = [step for step in range(steps) if runtime.report.chosen(step, sampled, cfg)]
        written = len(with_numbers) * groups * samples
        assert with_numbers[0] == 0 and len({b - a for a, b in zip(with_numbers, with_numbers[1:])}) <= 1
        assert written <= runtime.report.LIMIT
        assert len(with_numbers) == steps or 2 * (written + groups * samples) > runtime.report.LIMIT  # not too few
        rows = [{"step": step, **({"per_token": {}} if step in with_numbers else {})}
                for step in range(steps) for _ in range(groups * samples)]
        found = report.choose(rows, samples, runtime.report.LIMIT)
        assert [r["step"] for r in found] == [step for step in with_numbers for _ in range(groups * samples)]
        for limit in (100, 1000):
            few = report.choose(rows, samples, limit)
            assert 0 < len(few) <= limit and len(few) % samples == 0
            assert {r["step"] for r in few} <= set(with_numbers)


def test_a_step_with_more_rollouts_than_the_limit_gives_its_first_groups():
    cfg = make_config(samples=16, keep_rollouts=10**9, prompts=200)
    assert len(runtime.report.chosen(0, [[object()] * 16] * 200, cfg)) == 2000
    rows = [{"step": 0, "i": i} for i in range(3200)]
    assert [r["i"] for r in report.choose(rows, 16, 2000)] == list(range(2000))


@pytest.mark.numeric
def test_numbers_per_token_are_those_of_the_trainer_before_and_after_the_update(group, tokenizer, tmp_path):
    cfg = make_config(steps=2, samples=4, keep_rollouts=8, lr=1e-3, out=str(tmp_path), correction="none",
                      mismatch_bound=1e9, kl_coef=0.0)
    rollouts = fixed_rollouts(tokenizer)
    rollouts[1].sampled[:] = [True, *[False] * (len(rollouts[1].completion) - 1)]
    groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
    policy, log = nr.make_policy(cfg), Log(cfg, tokenizer)

    def alone(r):
        with torch.no_grad():
            return policy(nr.collate([r]))[0].tolist()

    before = list(map(alone, rollouts[:8]))
    metrics = {"lr": 0.0}
    with log.token_numbers(0, metrics, policy, groups, nr.collate):
        nr.update(policy, [nr.collate(rollouts)], cfg)
    after = list(map(alone, rollouts[:8]))
    log.write(0, metrics, groups)
    rows = runtime.report.read(log.folder, "rollouts.jsonl")
    assert len(rows) == 8  # those that are kept; the other 8 have no numbers
    for row, r, old, new in zip(rows, rollouts, before, after):
        lists = row["per_token"]
        assert {len(values) for values in lists.values()} == {len(r.completion)}
        positions = [i for i, sampled in enumerate(r.sampled) if sampled]
        for name, wanted in (("logp", old), ("change", [y - x for x, y in zip(old, new)]),
                             ("gap", [x - r.vllm_logps[i] for x, i in zip(old, positions)])):
            assert all(lists[name][i] is None for i in range(len(r.completion)) if i not in positions)
            for i, x in zip(positions, wanted):  # two digits, five decimals; rounding in other packs
                within(abs(lists[name][i] - x), 0.05 * abs(x) + 1e-5 + 1000 * EPS)
    assert max(abs(x) for row in rows for x in row["per_token"]["change"] if x) > 0.01
    assert metrics["seconds/report"] > 0

    with log.token_numbers(1, metrics, policy, groups, nr.collate):
        pass
    log.write(1, metrics, [[r] for r in rollouts[8:]])  # not those that were measured
    assert "per_token" not in runtime.report.read(log.folder, "rollouts.jsonl")[-1]


def test_the_texts_of_the_tokens_are_the_text_also_where_a_character_has_several_tokens(tokenizer):
    text = "<think>1+2=3\né 漢字 🙂</think>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = runtime.report.texts(ids, tokenizer)
    assert "".join(pieces) == text and len(pieces) == len(ids) > len(text) - len("<think></think>")
    assert pieces[0] == "<think>" and "" in pieces and "漢" in pieces
    broken = tokenizer("漢", add_special_tokens=False)["input_ids"][:1] * 9  # bytes that are no character
    assert len(runtime.report.texts(broken, tokenizer)) == 9


# ---- the run's screen

@pytest.fixture
def screen(tokenizer, tmp_path, monkeypatch, group):
    """A Log and the lines that it has written."""
    log, lines = Log(make_config(out=str(tmp_path), name="run", eval_n=8), tokenizer), []
    monkeypatch.setattr(log.bar, "write", lambda text: lines.extend(text.splitlines()))
    return log, lines


def test_a_step_is_one_line_that_fits_the_screen(screen):
    log, lines = screen
    row = {"lr": 1e-6, "reward/mean": 0.5, "reward/no_verdict": 0.0, "completion/length": 99.5, "kl": 0.01,
           "group/flat": 0.1, "entropy": 0.3, "tokens_per_second": 1000.0, "seconds/update": 1.5}
    log.write(7, row)
    assert lines == ["step    7  reward  0.500  length   99.5  flat  10%  kl 0.0100  entropy 0.300"
                     "    1000 tok/s  1.5 s"]
    log.write(99999, row | {"reward/mean": -12.345, "reward/no_verdict": 1.0, "completion/length": 32768.0,
                            "group/flat": 1.0, "kl": 12.3456, "tokens_per_second": 99999.0,
                            "seconds/update": 999.9})
    assert len(lines) == 2 and "no verdict 100%" in lines[1]
    names = "accuracy low high length no_verdict mean@8 pass@2 pass@4 pass@8 maj@8".split()
    log.write(8, {f"eval/{name}": 0.123 for name in names} | {"eval/n": 64})
    assert "held-out accuracy" in lines[2] and "maj@8 12.3%" in lines[-1]
    assert max(map(len, lines)) <= 120


def test_the_screen_says_what_goes_on_and_where_to_look_next(screen, capsys):
    log, lines = screen
    log.say("loading the model into vLLM ...")
    assert re.fullmatch(r" +\d+\.\d s  loading the model into vLLM \.\.\.", lines[0])
    write_run(log.folder.parent / "other")
    shutil.copytree(log.folder.parent / "other", log.folder, dirs_exist_ok=True)
    log.close()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"next: open {log.folder}/report.html; the model is {log.folder}/final: ")
    assert (log.folder / "report.html").stat().st_size > 10_000 and (log.folder / "curve.png").exists()
    log.cfg.steps = 0  # evaluates only: no model is written
    log.close()
    assert capsys.readouterr().out.splitlines()[-1] == f"next: open {log.folder}/report.html"


def test_a_run_leaves_the_plots_of_a_notebook_alone(tmp_path):
    """curve.png and report.html are drawn without pyplot, whose backend a notebook has chosen."""
    write_run(tmp_path / "run")
    program = f"""
import sys
from runtime import report
runtime.report.draw_curve([{str(tmp_path / 'run')!r}], {str(tmp_path / 'curve.png')!r})
report.write([{str(tmp_path / 'run')!r}], {str(tmp_path / 'report.html')!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
