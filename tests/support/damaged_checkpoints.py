"""Ways to damage the newest checkpoint of a run."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Damage:
    """A name, and what it does to the folder of checkpoints."""

    name: str
    apply: Callable[[Path], None]


def list_damages(checkpoints: Path, other: Path, *, seed: int) -> Iterator[Damage]:
    """Yield damages of every file of the newest checkpoint, of its manifest and of the folder.

    `checkpoints` has step-2, step-4 and step-6 of a run, and `other` those of a second one.
    """
    newest = checkpoints / "step-6"
    files = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    for file in files:
        for name, change in _file_changes(f"{seed} {file}").items():
            content = (newest / file).read_bytes()
            if change(content) != content:
                yield Damage(f"{file}: {name}", _rewrite(file, change))
        for name, source in (("of step-4", checkpoints / "step-4"), ("of another run", other)):
            swapped = source / file if name == "of step-4" else source / "step-6" / file
            if swapped.read_bytes() != (newest / file).read_bytes():
                yield Damage(f"{file}: {name}", _copy(swapped, file))
        yield Damage(
            f"{file}: removed", lambda folder, file=file: (folder / "step-6" / file).unlink()
        )
        yield Damage(f"{file}: a folder", _replace_by_folder(file))
    yield from _manifests()
    yield from _folders(other)


def _file_changes(seed: str) -> dict[str, Callable[[bytes], bytes]]:
    """Changes of a file's content, at places that the seed decides."""

    def place(content: bytes) -> int:
        return random.Random(seed).randrange(max(len(content), 1))

    def flip(content: bytes) -> bytes:
        if not content:
            return content
        at = place(content)
        changed = content[at] ^ 1 << random.Random(seed).randrange(8)
        return content[:at] + bytes([changed]) + content[at + 1 :]

    def zeros(content: bytes) -> bytes:
        at = place(content)
        length = min(4096, len(content) - at)
        return content[:at] + bytes(length) + content[at + length :]

    return {
        "truncated": lambda content: content[: place(content)],
        "empty": lambda content: b"",
        "a bit flipped": flip,
        "zeros": zeros,
        "all zeros": lambda content: bytes(len(content)),
        "longer": lambda content: content + b"\n",
    }


def _rewrite(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "step-6" / file
        path.write_bytes(change(path.read_bytes()))

    return apply


def _copy(source: Path, file: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copyfile(source, folder / "step-6" / file) and None


def _replace_by_folder(file: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "step-6" / file).unlink()
        (folder / "step-6" / file).mkdir()

    return apply


def _manifests() -> Iterator[Damage]:
    """Manifests that are JSON, but wrong; together with changed weights where they list less."""

    def edited(edit: Callable[[dict[str, Any]], Any], *, flip: bool = False) -> Any:
        def apply(folder: Path) -> None:
            path = folder / "step-6" / MANIFEST
            path.write_text(json.dumps(edit(json.loads(path.read_text()))))
            if flip:
                (shards,) = (folder / "step-6" / "trainer").glob("rank-*")
                content = bytearray(shards.read_bytes())
                content[-1] ^= 1
                shards.write_bytes(content)

        return apply

    def without(names: Callable[[str], bool]) -> Callable[[dict[str, Any]], Any]:
        return lambda manifest: (
            manifest | {"files": {k: v for k, v in manifest["files"].items() if not names(k)}}
        )

    def entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda manifest: (
            manifest | {"files": {k: v | changes for k, v in manifest["files"].items()}}
        )

    yield Damage("manifest: of another format", edited(lambda m: m | {"format": 7}))
    yield Damage("manifest: a list", edited(lambda m: [m]))
    yield Damage("manifest: null", edited(lambda m: None))
    yield Damage("manifest: without files", edited(lambda m: {"format": m["format"]}))
    yield Damage("manifest: files are a list", edited(lambda m: m | {"files": [*m["files"]]}))
    yield Damage("manifest: wrong digests", edited(entry(sha256="0" * 64)))
    yield Damage("manifest: wrong sizes", edited(entry(bytes=1)))
    yield Damage("manifest: sizes are words", edited(entry(bytes="many")))
    yield Damage("manifest: empty, a bit flipped", edited(without(lambda _: True), flip=True))
    only = without(lambda name: name.startswith("trainer/rank"))
    yield Damage("manifest: shards not listed, a bit flipped", edited(only, flip=True))
    renamed = edited(lambda m: m | {"files": {f"../step-4/{k}": v for k, v in m["files"].items()}})
    yield Damage("manifest: files of another folder", renamed)


def _folders(other: Path) -> Iterator[Damage]:
    """Whole checkpoints that are not what they are called."""

    def replaced(source: Callable[[Path], Path]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            shutil.rmtree(folder / "step-6")
            shutil.copytree(source(folder), folder / "step-6")

        return apply

    def half_written(share: float) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            files = sorted(path for path in (folder / "step-6").rglob("*") if path.is_file())
            for path in files[int(share * len(files)) :]:
                path.unlink()

        return apply

    def each(*steps: int) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            for step in steps:
                (shards,) = (folder / f"step-{step}" / "trainer").glob("rank-*")
                shards.write_bytes(shards.read_bytes()[:-100])

        return apply

    def hidden(folder: Path) -> None:
        (folder / "step-6").rename(folder / ".writing-step-6")

    def emptied(folder: Path) -> None:
        shutil.rmtree(folder / "step-6")
        (folder / "step-6").mkdir()

    def a_file(folder: Path) -> None:
        shutil.rmtree(folder / "step-6")
        (folder / "step-6").write_text("not a folder")

    yield Damage("checkpoint: of another run", replaced(lambda _: other / "step-6"))
    yield Damage("checkpoint: an older one renamed", replaced(lambda folder: folder / "step-4"))
    for share in (0.2, 0.5, 0.8, 0.95):
        yield Damage(f"checkpoint: {share:.0%} written", half_written(share))
    yield Damage("checkpoint: still being written", hidden)
    yield Damage("checkpoint: an empty folder", emptied)
    yield Damage("checkpoint: a file", a_file)
    yield Damage("checkpoints: the newest two cut short", each(6, 4))
    yield Damage("checkpoints: all cut short", each(6, 4, 2))
