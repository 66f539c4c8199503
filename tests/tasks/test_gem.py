"""The games of GEM, played by scripted policies."""

from collections.abc import Callable, Sequence
from contextlib import closing

import pytest

from trustbatch.errors import ReplyError
from trustbatch.tasks import build_task
from trustbatch.tasks.base import Spoken, Step
from trustbatch.tasks.environments.gem import Gem
from trustbatch.types import Role, Turn


def play(task: Gem, index: int, policy: Callable[[str, list[Turn]], str]) -> list[Step]:
    """Play an episode to its end."""
    prompt = task.prompt(index)
    turns: list[Turn] = []
    steps: list[Step] = []
    while not steps or steps[-1].reply is not None:
        turns.append(Turn(role=Role.POLICY, text=policy(prompt.text, turns)))
        steps += task.step_sessions([Spoken(key=(prompt.id, 0), prompt=prompt, turns=turns)])
        turns.append(Turn(role=Role.ENVIRONMENT, text=str(steps[-1].reply)))
    task.end_sessions([(prompt.id, 0)])
    return steps


def bisect(_: str, turns: Sequence[Turn]) -> str:
    """Guess a number from 1 to 10 in the middle of what is left."""
    low, high = 1, 10
    for turn in turns:
        if turn.role is Role.ENVIRONMENT:
            guess = (low + high) // 2
            low, high = (guess + 1, high) if "is higher" in turn.text else (low, guess - 1)
    return rf"I say \boxed{{{(low + high) // 2}}}."


def test_scripted_policies_play_real_games() -> None:
    game = "game:GuessTheNumber-v0-easy"
    with closing(Gem(id=game, sessions=1)) as task:
        for index in range(3):
            steps = play(task, index, bisect)
            assert steps[-1].reward == 1.0
            assert steps == play(task, index, bisect)  # the same seed, the same secret
        # one who never moves runs out of turns
        lazy = play(task, 0, lambda text, turns: r"\boxed{0}")
        assert lazy[-1].reward is not None
        assert lazy[-1].reward < 1.0


def test_random_moves_of_a_game_follow_from_its_seed() -> None:
    """2048 adds a tile at random after every move, from the process's own generator."""
    moves = ["up", "left", "down", "right", "up", "left"]

    def script(_: str, turns: Sequence[Turn]) -> str:
        done = len(turns) // 2
        return rf"\boxed{{{moves[done]}}}" if done < len(moves) else "I stop."

    with closing(Gem(id="game:Game2048-v0-easy")) as task:
        first = play(task, 0, script)
        assert first == play(task, 0, script)
        assert first != play(task, 1, script)
        assert len({str(step.reply) for step in first}) > 3


def test_an_unknown_game_is_refused_with_the_closest() -> None:
    sentence = r"did you mean 'game:GuessTheNumber-v0-easy'\?"
    task = Gem(id="game:GuessTheNumber-v0-easi")
    with closing(task), pytest.raises(ReplyError, match=sentence):
        task.prompt(0)


def test_the_id_is_required() -> None:
    with pytest.raises(ValueError, match=r"The task gem needs the option id: set task\.id"):
        build_task("gem", seed=0)
