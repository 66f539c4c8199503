"""Uploading a run to a hub, or writing what would be uploaded into a folder."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    # of the HTTP library that the client uses, which is another one in other versions of it
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
)
from huggingface_hub.utils import build_hf_headers, get_session, validate_repo_id

from trustbatch.errors import ConfigError, HubError, first_line
from trustbatch.hub.export import open_run, write_export

CONNECT_SECONDS = 10.0
"""how long the first answer of a hub may take"""


@dataclass(frozen=True)
class PushedRun:
    """What was uploaded, or written."""

    where: str
    """address of the repository, or the folder"""
    files: tuple[tuple[str, int], ...]
    """names and sizes in bytes"""


def push(
    run: Path | str,
    name: str,
    *,
    step: int | None = None,
    private: bool = False,
    update: bool = False,
    endpoint: str | None = None,
    folder: Path | str | None = None,
    base_model: str | None = None,
    evaluations: Sequence[Path] = (),
    say: Callable[[str], None] = lambda _: None,
) -> PushedRun:
    """Upload a checkpoint of a run, with its model card; the token is that of `hf auth login`.

    Args:
        run: the run folder.
        name: of the repository, such as "owner/model".
        step: of the checkpoint; default: the newest.
        private: whether a new repository is private.
        update: add a commit to a repository that exists; otherwise it is refused.
        endpoint: address of another hub.
        folder: write the files there, and upload nothing.
        base_model: name on the hub of the model that was trained, where it was a local folder.
        evaluations: folders that `trustbatch eval` has made, for the card.
        say: is told what is going on.
    """
    run = Path(run)
    _check_name(name)
    exported = open_run(run, step=step, base_model=base_model, evaluations=evaluations)
    if folder is not None:
        files = write_export(exported, run, Path(folder), name=name)
        return PushedRun(str(folder), _sizes(files))
    # before anything is copied
    api = _connect(endpoint)
    with tempfile.TemporaryDirectory(prefix=".push-", dir=run) as temporary:
        files = write_export(exported, run, Path(temporary), name=name)
        try:
            api.create_repo(name, private=private, exist_ok=update)
            say(f"uploading {len(files)} files to {api.endpoint}")
            message = f"Step {exported.checkpoint.name.removeprefix('step-')}, with trustbatch"
            api.upload_folder(repo_id=name, folder_path=temporary, commit_message=message)
        except HfHubHTTPError as error:
            raise _refused(error, name) from error
        except (HTTPError, OSError) as error:
            raise _unreachable(api.endpoint, error) from error
        except ValueError as error:  # of the metadata in the card
            raise HubError(
                f"The hub refused the files ({' '.join(str(error).split())}): write them to a "
                "--folder, correct them, and upload them with `hf upload`."
            ) from error
        return PushedRun(f"{api.endpoint}/{name}", _sizes(files))


def _check_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{name!r} is no name of a repository: write owner/model.") from error


def _connect(endpoint: str | None) -> HfApi:
    """Return a client whose hub has answered and knows the token."""
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint {endpoint} is no address: write https://HOST.")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set: unset it to push, or write to a --folder.")
    token = get_token()
    if token is None:
        raise ConfigError(
            "There is no token for the hub: set HF_TOKEN, run `hf auth login`, or write to a "
            "--folder."
        )
    api = HfApi(endpoint=endpoint, token=token)
    try:
        answer = get_session().get(
            f"{api.endpoint}/api/whoami-v2",
            headers=build_hf_headers(token=token),
            timeout=CONNECT_SECONDS,
        )
    except (HTTPError, OSError) as error:
        raise _unreachable(api.endpoint, error) from error
    if answer.status_code in (401, 403):
        raise HubError(
            f"{api.endpoint} does not accept the token: make a new one, with write access."
        )
    return api


def _refused(error: HfHubHTTPError, name: str) -> HubError:
    status = error.response.status_code
    if status == 409:
        return HubError(
            f"{name} exists already: choose another name, or add a commit to it with --update."
        )
    if status in (401, 403):
        return HubError(
            f"The token may not write to {name}: choose a name of your own, or a token with write "
            "access."
        )
    return HubError(
        f"The hub refused {name} with status {status} ({error.server_message or 'no reason'}): "
        "try again, or write to a --folder."
    )


def _unreachable(endpoint: str, error: Exception) -> HubError:
    return HubError(
        f"{endpoint} can't be reached ({first_line(error)}): check the network and --endpoint, or "
        "write to a --folder."
    )


def _sizes(files: Sequence[Path]) -> tuple[tuple[str, int], ...]:
    return tuple((file.name, file.stat().st_size) for file in files)
