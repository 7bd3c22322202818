"""The pictures of the ready masks: `python -m flashspan.bench.patterns`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["patterns", *words])
    monkeypatch.delitem(sys.modules, "flashspan.bench.patterns", raising=False)
    runpy.run_module("flashspan.bench.patterns", run_name="__main__")


def test_help_is_shown_and_nothing_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "--help")
    assert end.value.code == 0
    assert "python -m flashspan.bench.patterns" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_pictures_go_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, tmp_path, "drawn")
    said = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert Path("drawn/causal.png") in said
    assert sorted(said) == sorted(path.relative_to(tmp_path) for path in (tmp_path / "drawn").iterdir())
