"""The pictures of the predefined masks: `flashspan bench masks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashspan.cli import main


def test_help_is_shown_and_nothing_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["bench", "masks", "--help"])
    assert not end.value.code
    assert "flashspan bench masks" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_pictures_go_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "masks", "drawn"]) == 0
    said = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert Path("drawn/causal.png") in said
    assert sorted(said) == sorted(path.relative_to(tmp_path) for path in (tmp_path / "drawn").iterdir())
