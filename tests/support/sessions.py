"""Sessions of a run, trained without the command line around them."""

from trustbatch.build.session import build_source
from trustbatch.loops.recorder import Recorder
from trustbatch.loops.session import Session
from trustbatch.loops.train import train
from trustbatch.observe.progress import Progress


def train_session(session: Session) -> dict[str, float]:
    """Train a session to its end; returns the last step's metrics. Its folder is closed after."""
    try:
        source = build_source(session)
        progress = Progress("run", session.config.training.steps)
        return train(session, source, Recorder(session, source, progress))
    finally:
        session.run.close()
