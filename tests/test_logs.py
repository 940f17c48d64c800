"""Readers of a log survive a killed writer; wandb is checked before anything is loaded."""
import json
import sys

import pytest

from runtime import log, report


def metrics(folder, *lines):
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    return folder


def test_a_last_line_that_is_cut_off_is_skipped_with_a_note(tmp_path, capsys):
    whole = b'{"step": 0, "reward/mean": 0.5}'
    for cut in (b'{"step": 1, "rew', b'{"step": 1, "name": "\xc3', b"{"):
        assert report.read(metrics(tmp_path, whole, cut)) == [json.loads(whole)]
        says = f"note: {tmp_path}/metrics.jsonl:2 is cut off: skipped\n"
        assert capsys.readouterr().err == says
    assert report.read(metrics(tmp_path, whole, whole)) == 2 * [json.loads(whole)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mode, key, says", [
    ("online", "", "no API key: run `wandb login`"), ("online", "sentinel", "must have 40"),
    ("offline", "", None), ("off", "", None)])
def test_wandb_without_a_key_is_refused_where_it_is_needed(monkeypatch, tmp_path, mode, key, says):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", key) if key else monkeypatch.delenv("WANDB_API_KEY", False)
    if not says:
        return log.check_wandb(mode)
    with pytest.raises(ValueError, match=f"^--wandb online: .*{says}") as e:
        log.check_wandb(mode)
    assert "sentinel" not in str(e.value)


def test_a_missing_wandb_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log.check_wandb("off")
    with pytest.raises(ValueError, match="^--wandb offline: .*pip install wandb, or use"):
        log.check_wandb("offline")
