"""What is kept of a finished run: the trained model, without what only training goes on from."""

import json
import shutil
from pathlib import Path

from trustbatch.checkpoints.load import TRAINER_FOLDER
from trustbatch.checkpoints.manifest import MANIFEST_FILE, write_manifest


def keep_weights_only(checkpoint: Path) -> None:
    """Remove the trainer's state, three times as large as the model; the rest stays whole."""
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
    kept = {
        name: entry
        for name, entry in manifest["files"].items()
        if not name.startswith(f"{TRAINER_FOLDER}/")
    }
    write_manifest(checkpoint, kept)
    shutil.rmtree(checkpoint / TRAINER_FOLDER, ignore_errors=True)
