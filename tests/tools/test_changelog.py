"""The changelog and the files of `changes/`: their format, and how a release puts them together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import changelog

ROOT = Path(__file__).resolve().parents[2]
CHANGES = ROOT / "changes"


def test_every_file_of_changes_is_an_entry() -> None:
    for path in changelog.fragments(CHANGES):
        changelog.entry_of(path)


def test_the_first_version_says_in_sixty_lines_what_busrl_does() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = text[text.index("## 0.1.0"):]
    assert len(first.splitlines()) <= 60
    pages = [name for names in re.findall(r"^- .*\(([a-z, -]+)\)$", first, re.M) for name in names.split(", ")]
    assert len(pages) > 20 and all((ROOT / "docs" / f"{name}.md").exists() for name in pages)


@pytest.mark.parametrize(("name", "text", "problem"), [
    ("Upper.md", "added: x\n", "lower case"),
    ("a_b.md", "added: x\n", "lower case"),
    ("a.txt", "added: x\n", "lower case"),
    ("a.md", "new: x\n", "KIND"),
    ("a.md", "added x\n", "KIND"),
    ("a.md", "added: x", "KIND"),
    ("a.md", "added: x\ny\nz\n", "KIND"),
    ("a.md", "added: x\n\ny\n", "KIND"),
    ("a.md", f"added: {'x' * 150}\n", "characters"),
])
def test_what_is_no_entry_is_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(changelog.FormatError, match=problem):
        changelog.entry_of(tmp_path / name)


def test_a_release_takes_the_entries_by_kind_and_removes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changes").mkdir()
    for name, text in (("b", "fixed: A hole\nin a wall.\n"), ("a", "fixed: Another.\n"), ("c", "added: A door.\n")):
        (tmp_path / "changes" / f"{name}.md").write_text(text)
    (tmp_path / "changes" / "README.md").write_text("how\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nIntroduction.\n\n## 0.1.0\nBefore.\n")
    monkeypatch.setattr(changelog, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["changelog.py", "--release", "0.2.0"])
    assert changelog.main() == 0
    written = re.sub(r"\(\d{4}-\d\d-\d\d\)", "(DATE)", (tmp_path / "CHANGELOG.md").read_text())
    assert written == (
        "# Changelog\n\nIntroduction.\n\n## 0.2.0 (DATE)\n\n### Added\n- A door.\n\n### Fixed\n- Another.\n"
        "- A hole in a wall.\n\n## 0.1.0\nBefore.\n"
    )
    assert [path.name for path in (tmp_path / "changes").iterdir()] == ["README.md"]


def test_without_a_release_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "a.md").write_text("changed: A wall.\n")
    monkeypatch.setattr(changelog, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["changelog.py"])
    assert changelog.main() == 0
    assert capsys.readouterr().out == "## Next release\n\n### Changed\n- A wall.\n"
    (tmp_path / "changes" / "a.md").write_text("a wall\n")
    assert changelog.main() == 1
    assert "a.md" in capsys.readouterr().err
