"""How long an engine takes to decode a chunk of requests, and when each completion ends.

An engine advances all running rows by one token a step. Between two ends nothing changes but the
rows' contexts, which grow by one token each, so the seconds of many steps have a closed form and
the simulation jumps from end to end, in many chunks of one size at once.
"""

from typing import Any

import numpy as np
from scaling_costs import EngineCosts

REFILL_BELOW = 0.75
"""waiting groups enter when less than this share of the seats is taken, as in the native engine"""


def steps_seconds(costs: EngineCosts, *, steps: Any, rows: Any, context: Any) -> Any:
    """Return the seconds of a number of steps in which no row ends; numbers or arrays."""
    read = context * steps + rows * steps * (steps - 1) / 2
    return steps * (costs.step + rows * costs.row) + costs.cached * read


def chunk_ends(costs: EngineCosts, chunks: np.ndarray, *, prompt: int) -> np.ndarray:
    """Return when each completion ends, in seconds from its chunk's start.

    Args:
        costs: of the engine.
        chunks: lengths, [chunks, groups, samples]. Groups enter whole, in their order, while there
            are seats for them; the first always does.
        prompt: tokens of a prompt. Its own computation is not charged.
    """
    num_chunks, num_groups, samples = chunks.shape
    if num_groups * samples <= costs.seats:
        flat = _together_ends(costs, chunks.reshape(num_chunks, -1), prompt=prompt)
        return flat.reshape(chunks.shape)
    return _refilled_ends(costs, chunks, prompt=prompt)


def _together_ends(costs: EngineCosts, lengths: np.ndarray, *, prompt: int) -> np.ndarray:
    """Return the ends, [chunks, rows] as the lengths, where all rows of a chunk start together."""
    order = np.argsort(lengths, axis=1, kind="stable")
    at = np.take_along_axis(lengths, order, axis=1).astype(np.float64)
    before = np.concatenate([np.zeros((len(at), 1)), at[:, :-1]], axis=1)
    rows = at.shape[1] - np.arange(at.shape[1], dtype=np.float64)
    seconds = steps_seconds(costs, steps=at - before, rows=rows, context=rows * (prompt + before))
    ends = np.empty_like(at)
    np.put_along_axis(ends, order, np.cumsum(seconds, axis=1), axis=1)
    return ends


def _refilled_ends(costs: EngineCosts, chunks: np.ndarray, *, prompt: int) -> np.ndarray:
    """Return the ends where groups wait for seats; one row of every chunk ends at a time."""
    num_chunks, num_groups, samples = chunks.shape
    lengths = chunks.reshape(num_chunks, -1).astype(np.float64)
    end_steps = np.full(lengths.shape, np.inf)  # of the rows that run
    ends = np.empty(lengths.shape)
    entered, running = np.zeros(num_chunks, np.int64), np.zeros(num_chunks, np.int64)
    step, context, seconds = np.zeros(num_chunks), np.zeros(num_chunks), np.zeros(num_chunks)
    every = np.arange(num_chunks)
    for _ in range(lengths.shape[1]):
        row = end_steps.argmin(axis=1)
        refills = (running < REFILL_BELOW * costs.seats) & (end_steps[every, row] > step)
        while True:
            has_room = (running == 0) | (running + samples <= costs.seats)
            enters = np.flatnonzero(refills & has_room & (entered < num_groups))
            if not len(enters):
                break
            places = entered[enters, None] * samples + np.arange(samples)
            which = enters[:, None]
            end_steps[which, places] = step[which] + lengths[which, places]
            entered[enters] += 1
            running[enters] += samples
            context[enters] += samples * prompt
            row = None
        row = end_steps.argmin(axis=1) if row is None else row
        steps = end_steps[every, row] - step
        seconds += steps_seconds(costs, steps=steps, rows=running, context=context)
        step += steps
        context += running * steps - prompt - lengths[every, row]
        running -= 1
        end_steps[every, row] = np.inf
        ends[every, row] = seconds
    return ends.reshape(chunks.shape)
