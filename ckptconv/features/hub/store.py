"""Reads repositories of the Hugging Face hub: hf://org/model@revision/path.

Source: huggingface_hub's `HfFileSystem`. A branch may move while it is read, and a commit may not. So a URL is resolved
to a commit once, and all later reads are of that commit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from ckptconv.errors import CkptconvError, FailedError, MissingError, UsageError
from ckptconv.features.remote import access
from ckptconv.features.remote.stores import Meant, Options, Put, Ranges, Store

_SCHEME = "hf://"
_CALLED = "a repository of the Hugging Face hub"
# A path at a commit, with the scheme or without.
_PINNED = re.compile(r"(?:hf://)?(?:(?:models|datasets|spaces|kernels)/)?[^/@]+/[^/@]+@[0-9a-f]{40}(?:/|$)")
# A / in a revision is written %2F, except in those of pull requests and of converted files.
_REVISION = r"^(hf://(?:[^/@]+/){0,2}[^/@]+)@(?:refs/(?:pr|convert)/[^/]+|[^/]*)"
# Text that people copy instead: the name of a repository, and the address of a page about it or its content.
_NAME = r"(?a:[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w.-]+)?)"
_PAGE = (
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>(?:datasets/)?[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob)/(?P<revision>[^/?#]+)(?P<below>(?:/[^/?#]+)*))?/?(?:[?#].*)?"
)
_WITHOUT_OWNER = r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<name>(?a:[\w-]+))/?"
_TOKEN = "set HF_TOKEN to a token that may read it, or run `hf auth login`"
# Texts for its errors, by the name of their class, and hints.
_REFUSALS = {
    "GatedRepoError": (
        "its repository is gated, and your access was not granted",
        "Request access on its hub page, then set HF_TOKEN to your token, or run `hf auth login`.",
    ),
    "DisabledRepoError": ("its repository is disabled on the hub", "See its page on the hub."),
}
_NAMED = (
    "Use the form hf://organization/model, with an optional @revision and path: hf://organization/model@revision/path."
)


def is_pinned(inner: str) -> bool:
    """Return whether a path names a commit, so that its content never changes."""
    return _PINNED.match(inner) is not None


def without_revision(url: str) -> str:
    """Return a URL without its revision: hf://org/model@v1/x is hf://org/model/x."""
    return re.sub(_REVISION, r"\1", url)


def meant(text: str) -> Meant | None:
    """Return the URL for `text`, the name of a repository or the address of a page about one; None if it is neither."""
    page = re.fullmatch(_PAGE, text)
    if page is None and (alone := re.fullmatch(_WITHOUT_OWNER, text)):
        return Meant(_CALLED, f"{_SCHEME}ORGANIZATION/{alone['name']}")
    if page is None:
        return Meant(_CALLED, f"{_SCHEME}{text}") if re.fullmatch(_NAME, text) else None
    revision = "" if page["revision"] in (None, "main") else f"@{page['revision']}"
    return Meant(_CALLED, f"{_SCHEME}{page['repository']}{revision}{page['below'] or ''}")


def pinned(url: str, options: Options) -> str:
    """Return `url` with its revision replaced by the current commit.

    Raise UsageError if there is no such repository or revision, or none that may be read; FailedError if the hub does
    not answer.
    """
    if is_pinned(url) or url.startswith(f"{_SCHEME}buckets/"):
        return url  # buckets have no commits
    fs, inner = access.filesystem(url, options)
    try:
        return access.retrying(lambda: _resolved(fs, inner, url))
    except CkptconvError:
        raise
    except Exception as error:
        hint = access.hint(error) or "Check the network, HF_ENDPOINT and HF_TOKEN."
        raise FailedError(f"{url} cannot be accessed: {access.why(error)}.", hint) from error


def _resolved(fs: Any, inner: str, url: str) -> str:
    """Return the URL of `inner` at its commit. Raise UsageError for a final refusal."""
    from huggingface_hub import HfApi, errors

    fs.invalidate_cache()
    try:
        resolved = fs.resolve_path(inner)
        api = HfApi(endpoint=fs.endpoint, token=fs.token)
        commit = api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision).sha
    except errors.OfflineModeIsEnabled as error:
        raise UsageError(
            f"{url} cannot be read: it is on the hub, but HF_HUB_OFFLINE is set.",
            "Unset HF_HUB_OFFLINE, or specify the directory of a local copy.",
        ) from error
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{url} is not a path on the hub: {' '.join(str(error).split())}", _NAMED) from error
    except (FileNotFoundError, errors.HfHubHTTPError) as error:
        refused = _refused(url, error, errors)
        if refused is None:
            raise
        raise refused from error
    kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
    place = f"{_SCHEME}{kind}{resolved.repo_id}@{commit}"
    return f"{place}/{resolved.path_in_repo}".rstrip("/")


def _refused(url: str, error: BaseException, errors: Any) -> UsageError | None:
    """Return the error for an answer of the hub that a repetition does not change; None for other answers."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
    if isinstance(cause, ValueError):
        return UsageError(f"{url} is not a path on the hub: {' '.join(str(cause).split())}", _NAMED)
    if isinstance(cause, errors.GatedRepoError):
        why, hint = _REFUSALS["GatedRepoError"]
        return UsageError(f"{url} cannot be read: {why}.", hint)
    if isinstance(cause, errors.RevisionNotFoundError):
        return MissingError(
            f"{url} does not exist: its repository has no such revision.",
            "Specify a branch, a tag or a commit; write a / in the name of a branch as %2F.",
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return MissingError(
            f"{url} does not exist: the hub has no such repository, or it is private.",
            f"Check its name; if it is private, {_TOKEN}.",
        )
    if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code == 401:
        return UsageError(
            f"{url} cannot be read: the hub rejected the token.",
            "Check HF_TOKEN, or run `hf auth login`.",
        )
    return None


def _call(fs: Any, method: str, inner: str, **settings: Any) -> Any:
    with _refusals():
        return getattr(fs, method)(inner, **settings)


def _ranges(fs: Any, inner: str, size: int, version: str) -> Ranges:
    # Otherwise the hub's file system requests the size before each range.
    read = access.from_file(fs, inner, cache_type="none", size=size)

    def read_range(start: int, stop: int, put: Put) -> None:
        with _refusals():
            read(start, stop, put)

    return read_range


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn an error that no repetition changes into a RefusedError with a hint."""
    try:
        yield
    except Exception as error:
        for cause in access.causes(error):
            if type(cause).__name__ in _REFUSALS:
                raise access.RefusedError(*_REFUSALS[type(cause).__name__]) from error
        raise


STORE = Store(
    extra="hub",
    call=_call,
    fixed=is_pinned,
    ranges=_ranges,
    parallel=True,
    pinned=pinned,
    plain=without_revision,
    repository=True,
    meant=meant,
    instead="Write to a local directory with --for-hub, and upload it with `hf upload`.",
)
