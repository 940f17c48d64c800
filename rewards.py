"""First working version (being replaced): verifiers run inline, without the worker pool."""
import ast, hashlib, importlib, importlib.util, math, re, sys
from concurrent.futures import Future
from fractions import Fraction
from functools import lru_cache
from pathlib import Path


def text_of(c):
    return c if isinstance(c, str) else "".join(m["content"] or "" for m in c)


BOX = re.compile(r"\\f?boxed\s{0,3}\{|<answer>|####[ \t]*(?=[-+$€£¥\\.\d])")
SAYS = re.compile(r"(?i)\banswer\b\W{0,4}(?:is\b|:|=)[ \t:*]*\s*(?=[^\n]*\d)|^[ \t]{0,8}A:[ \t]*(?=[^\n]*\d)", re.M)


def answer_of(text):
    if "<think>" in text and "</think>" not in text:
        return None
    text = text.rpartition("</think>")[2]
    marks = list(BOX.finditer(text)) or list(SAYS.finditer(text))
    if not marks:
        return None
    mark, rest = marks[-1], text[marks[-1].end():]
    if mark[0] == "<answer>":
        return rest.partition("</answer>")[0].strip()
    if mark[0].endswith("{"):
        depth = 1
        for m in re.finditer(r"\\.|[{}]", rest, re.S):
            depth += (m[0] == "{") - (m[0] == "}")
            if depth == 0:
                return rest[:m.start()].strip()
        return None
    return rest.partition("\n")[0].strip()


def number(s):
    s = s.replace(",", "").replace("$", "").replace("−", "-")
    found = re.findall(r"-?\d{1,50}(?:\.\d{1,50})?(?:/\d{1,50})?", s.rpartition("=")[2])
    try:
        return Fraction(found[-1]) if found else None
    except ZeroDivisionError:
        return None


def gsm8k_reward(completions, answer, **_):
    out = []
    for c, a in zip(completions, answer):
        gold, got = number(str(a).rpartition("####")[2]), answer_of(text_of(c))
        got = number(got if got is not None else text_of(c).rpartition("</think>")[2])
        out.append(None if gold is None else float(got == gold))
    return out


@lru_cache(4096)
def _same(gold, got):
    from math_verify import parse, verify
    return verify(parse(f"\\boxed{{{gold}}}", parsing_timeout=None), parse(f"\\boxed{{{got}}}", parsing_timeout=None),
                  timeout_seconds=None)


def math_reward(completions, answer, **_):
    return [float(bool(got) and _same(str(a), got[:500])) for c, a in zip(completions, answer) for got in [answer_of(text_of(c))]]


OPS = {ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.Div: lambda a, b: a / b}


def _value(node):
    if isinstance(node, ast.BinOp):
        return OPS[type(node.op)](_value(node.left), _value(node.right))
    return Fraction(node.value)


def countdown_reward(completions, numbers, target, **_):
    out = []
    for c, ns, t in zip(completions, numbers, target):
        e = (answer_of(text_of(c)) or "").replace("×", "*").replace("÷", "/").replace("−", "-")
        e = e.partition("=")[0].strip()
        ok = re.fullmatch(r"[\d+\-*/() ]{1,300}", e) and sorted(map(int, re.findall(r"\d{1,9}", e))) == sorted(ns)
        try:
            out.append(float(bool(ok) and _value(ast.parse(e, mode="eval").body) == t))
        except (SyntaxError, KeyError, ZeroDivisionError, AttributeError):
            out.append(0.0)
    return out


R1 = re.compile(r"\s*(?:<think>)?((?:(?!</?(?:think|answer)>).)*)</think>\s*<answer>((?:(?!</?(?:think|answer)>).)*)</answer>\s*", re.S)


def format_reward(completions, **_):
    return [float(bool(R1.fullmatch(text_of(c)))) for c in completions]


def random_reward(completions, seed=0, index=None, step=None, **_):
    return [float(hashlib.blake2b(repr((seed, step, (index or range(len(completions)))[i], text_of(c))).encode("utf-8", "surrogatepass"), digest_size=8).digest()[0] & 1)
            for i, c in enumerate(completions)]


def overlong_reward(completions, completion_ids, max_tokens, overlong_buffer, **_):
    return [min(0.0, max(-1.0, (max_tokens - overlong_buffer - len(ids)) / overlong_buffer)) for ids in completion_ids]


REWARDS = {"gsm8k": gsm8k_reward, "math": math_reward, "countdown": countdown_reward, "format": format_reward,
           "random": random_reward, "overlong": overlong_reward}


def parse_rewards(spec):
    out = []
    for item in filter(None, map(str.strip, spec.split(","))):
        parts, weight = item.split(":"), 1.0
        if len(parts) > 1:
            try:
                weight, parts = float(parts[-1]), parts[:-1]
            except ValueError:
                if parts[0] in REWARDS:
                    raise ValueError(f"reward {item!r}: the weight is not a number") from None
        if not math.isfinite(weight):
            raise ValueError(f"reward {item!r}: the weight is not finite")
        if len(parts) == 1:
            if parts[0] not in REWARDS:
                raise ValueError(f"unknown reward {parts[0]!r}; known: {', '.join(REWARDS)}, or my_file.py:function")
            out.append((parts[0], weight, REWARDS[parts[0]]))
            continue
        where, name = parts
        try:
            if where.endswith(".py"):
                s = importlib.util.spec_from_file_location(Path(where).stem, where)
                module = importlib.util.module_from_spec(s)
                s.loader.exec_module(module)
            else:
                module = importlib.import_module(where)
            out.append((name, weight, getattr(module, name)))
        except (FileNotFoundError, ImportError, AttributeError) as e:
            raise ValueError(f"reward {item!r}: {e}") from None
    if not out:
        raise ValueError("no rewards given")
    return out


class Verifier:
    def __init__(self, spec, workers=None, timeout=5.0, messages=False, allow_unsafe_code=False, **settings):
        self.rewards, self.messages, self.settings = parse_rewards(spec), messages, settings

    def __call__(self, completions, **columns):
        given = [[{"role": "assistant", "content": c}] for c in completions] if self.messages else completions
        parts = {name: f(completions=given, **{**self.settings, **columns}) for name, _, f in self.rewards}
        total = []
        for i in range(len(completions)):
            got = [w * parts[n][i] for n, w, _ in self.rewards if parts[n][i] is not None]
            total.append(sum(got) if got else None)
        return total, parts, {"reward/timeouts": 0.0, "reward/crashes": 0.0}

    def submit(self, completions, **columns):
        f = Future()
        f.set_result(self(completions, **columns))
        return f

    def close(self):
        pass
