"""`trustbatch completion`: what real shells make of the scripts."""

import shutil
import subprocess
from collections.abc import Sequence

import pytest

from trustbatch.cli import build_parser, main
from trustbatch.commands.completion import known_words
from trustbatch.config.keys import config_keys

COMPLETE = """
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
{function}; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", request.param]) == 0
    return capsys.readouterr().out


def in_bash(script: str, words: Sequence[str]) -> list[str]:
    """What bash completes the last word to, with the function that it has registered."""
    quoted = " ".join(f"'{word}'" for word in words)
    found = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\ncomplete -p trustbatch"],
        capture_output=True,
        text=True,
        check=True,
    )
    function = found.stdout.split(" -F ")[1].split()[0]
    text = script + COMPLETE.format(words=quoted, function=function)
    done = subprocess.run(
        ["bash", "--norc", "-c", text], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes_commands_options_and_keys(script: str) -> None:
    assert in_bash(script, ["trustbatch", "tr"]) == ["train"]
    assert set(known_words(build_parser()).commands) < set(in_bash(script, ["trustbatch", ""]))
    assert in_bash(script, ["trustbatch", "train", "x", "--dry"]) == ["--dry-run"]
    assert in_bash(script, ["trustbatch", "train", "x", "--rollout.temp"]) == [
        "--rollout.temperature"
    ]
    keys = {f"--{key}" for key in config_keys()}
    assert keys < set(in_bash(script, ["trustbatch", "doctor", "x", "--"]))
    assert "--objective.clip_high" in keys
    # a command without keys has none, and what is no option is a file
    assert not keys & set(in_bash(script, ["trustbatch", "report", "x", "--"]))
    assert "/tmp" in in_bash(script, ["trustbatch", "train", "/tm"])


@pytest.mark.parametrize("script", ["zsh", "fish"], indirect=True)
def test_other_shells_read_their_scripts(script: str, request: pytest.FixtureRequest) -> None:
    shell = request.node.callspec.params["script"]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("script", ["bash", "zsh", "fish"], indirect=True)
def test_every_script_has_every_command_and_key(script: str) -> None:
    words = known_words(build_parser())
    for name, help in words.commands.items():
        assert name in script
        assert help
    for key in config_keys():
        assert key in script


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
