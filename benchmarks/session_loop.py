"""The main loop over a session, for benchmarks that watch its parts or its progress."""

from trustbatch.build.session import build_source
from trustbatch.loops.recorder import Recorder
from trustbatch.loops.session import Session
from trustbatch.loops.train import train
from trustbatch.observe.progress import Progress


def train_session(session: Session, progress: Progress) -> None:
    """Train as `trustbatch.train` does; the caller closes the session."""
    source = build_source(session)
    try:
        train(session, source, Recorder(session, source, progress))
    finally:
        source.close()
