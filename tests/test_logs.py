"""Readers of a log survive a killed writer; wandb is checked before anything is loaded."""
import json

import pytest

from runtime import log, report


def test_a_last_line_that_is_cut_off_is_skipped_with_a_note(tmp_path, capsys):
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 0, "reward/mean": 0.5}\n'
    for cut in (b'{"step": 1, "rew', b'{"step": 1, "name": "\xc3', b"{"):
        path.write_bytes(whole + cut)
        assert report.read(tmp_path) == [json.loads(whole)]
        assert capsys.readouterr().err == f"note: {path}:2 is cut off: skipped\n"
    path.write_bytes(2 * whole)
    assert report.read(tmp_path) == 2 * [json.loads(whole)] and not capsys.readouterr().err
    assert report.read(tmp_path, "eval.jsonl") == []


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
