"""examples/quickstart.ipynb runs from top to bottom, here with few steps."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FILE = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
FEW_STEPS = """STEPS = 3
CLEAN_STEPS, NOISY_STEPS = 20, 4
FRESH_SAMPLES = 24
FOLDER = "runs/notebook"
"""


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(
        output.get("text") or output.data["text/plain"]
        for output in cell.outputs
        if output.get("name") != "stderr"
    )


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(FILE, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (parameters,) = (cell for cell in code if "parameters" in cell.metadata.get("tags", []))
    assert {line.split(" = ")[0] for line in parameters.source.splitlines()} == {
        line.split(" = ")[0] for line in FEW_STEPS.splitlines()
    }
    parameters.source = FEW_STEPS
    shown = {cell.id: [output.output_type for output in cell.outputs] for cell in code}
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "\n".join(map(printed, code))
    assert "runs/notebook/p3o/checkpoints/step-3" in text
    assert "off-policy by configuration" in text
    assert "p3o, step 1 (computed again): 256 completions" in text
    assert "brevity" in text
    # what the file shows is what its cells give: where there are outputs, and none that is missing
    for cell in code:
        shows_now = [each for each in cell.outputs if each.get("name") != "stderr"]
        assert bool(shows_now) == bool(shown[cell.id]), cell.source
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
