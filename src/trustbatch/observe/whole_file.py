"""Files that are replaced in one go."""

from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Replace a file at once: a kill leaves the old content or the new, never a part."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
