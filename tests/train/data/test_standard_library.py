"""The text that every machine has."""

from __future__ import annotations

from pathlib import Path

from moeclipse.train.data.standard_library import standard_library


def test_installed_packages_are_left_out_and_names_sorted(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.py", "a.py", "site-packages/x.py", "c/dist-packages/y.py", "a/data.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.py").mkdir()
    assert [path.relative_to(tmp_path).as_posix() for path in standard_library(tmp_path)] == [
        "a.py",
        "a/z.py",
        "b.py",
    ]
