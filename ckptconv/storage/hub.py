"""Repositories of the Hugging Face hub: hf://org/model@revision/path.

Source: huggingface_hub's `HfFileSystem`. A branch may move while it is read, and a commit may not: so a URL is resolved
to a commit once, and all that is read afterwards is of that commit.
"""

from __future__ import annotations

import re
from typing import Any

from ckptconv.errors import CkptconvError, FailedError, MissingError, UsageError
from ckptconv.storage import remote

_SCHEME = "hf://"
# A / in a revision is written %2F, but for those of pull requests and of converted files.
_REVISION = r"^(hf://(?:[^/@]+/){0,2}[^/@]+)@(?:refs/(?:pr|convert)/[^/]+|[^/]*)"
# What people copy instead: the name of a repository, and a page about it or about what is in it.
_NAME = r"(?a:[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w.-]+)?)"
_PAGE = (
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>(?:datasets/)?[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob)/(?P<revision>[^/?#]+)(?P<below>(?:/[^/?#]+)*))?/?(?:[?#].*)?"
)
_TOKEN = "set HF_TOKEN to a token that may read it, or run `hf auth login`"
_NAMED = "It is written hf://organization/model, with @revision, and then a path in it, if need be."


def is_hub(path: str) -> bool:
    """Whether a path is one of the hub."""
    return path.startswith(_SCHEME)


def without_revision(path: str) -> str:
    """Return `path` without a revision, if it is one on the hub: hf://org/model@v1/x is hf://org/model/x."""
    return re.sub(_REVISION, r"\1", path) if is_hub(path) else path


def repository_url(path: str) -> str:
    """Return the URL for `path`, the name of a repository or the address of a page about one; "" if it is neither."""
    page = re.fullmatch(_PAGE, path)
    if page is None:
        return f"{_SCHEME}{path}" if re.fullmatch(_NAME, path) else ""
    revision = "" if page["revision"] in (None, "main") else f"@{page['revision']}"
    return f"{_SCHEME}{page['repository']}{revision}{page['below'] or ''}"


def pinned(url: str, options: remote.Options) -> str:
    """Return `url` with its revision replaced by the commit that it is now; other paths as they are.

    Raise UsageError if there is no such repository or revision, or none may be asked for, or `url` is that of a page
    about one; FailedError if the hub does not answer.
    """
    if url.startswith("http") and re.fullmatch(_PAGE, url):
        raise UsageError(f"{url} is a page about a repository of the Hugging Face hub.", f"Give {repository_url(url)}.")
    if not is_hub(url) or remote.is_pinned(url) or url.startswith(f"{_SCHEME}buckets/"):
        return url  # buckets have no commits
    fs, inner = remote.filesystem(url, options)
    try:
        return remote.retrying(lambda: _resolved(fs, inner, url))
    except CkptconvError:
        raise
    except Exception as error:
        hint = remote.hint(error) or "Check the network, HF_ENDPOINT and HF_TOKEN."
        raise FailedError(f"{url} cannot be looked at: {remote.why(error)}.", hint) from error


def _resolved(fs: Any, inner: str, url: str) -> str:
    """Return the URL of `inner` at its commit. Raise UsageError for what is refused for good."""
    from huggingface_hub import HfApi, errors

    fs.invalidate_cache()
    try:
        found = fs.resolve_path(inner)
        api = HfApi(endpoint=fs.endpoint, token=fs.token)
        commit = api.repo_info(found.repo_id, repo_type=found.repo_type, revision=found.revision).sha
    except errors.OfflineModeIsEnabled as error:
        raise UsageError(
            f"{url} cannot be read: HF_HUB_OFFLINE is set, and it is on the hub.",
            "Unset it, or give the directory of a copy that is here.",
        ) from error
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{url} is no path of the hub: {' '.join(str(error).split())}", _NAMED) from error
    except (FileNotFoundError, errors.HfHubHTTPError) as error:
        refused = _refused(url, error, errors)
        if refused is None:
            raise
        raise refused from error
    kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
    place = f"{_SCHEME}{kind}{found.repo_id}@{commit}"
    return f"{place}/{found.path_in_repo}".rstrip("/")


def _refused(url: str, error: BaseException, errors: Any) -> UsageError | None:
    """Return the error for a hub's answer that a repetition does not change; None for any other answer."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
    if isinstance(cause, ValueError):
        return UsageError(f"{url} is no path of the hub: {' '.join(str(cause).split())}", _NAMED)
    if isinstance(cause, errors.GatedRepoError):
        return UsageError(f"{url} cannot be read: {remote.why(cause)}.", remote.hint(cause))
    if isinstance(cause, errors.RevisionNotFoundError):
        return MissingError(
            f"{url} does not exist: its repository has no such revision.",
            "Give a branch, a tag or a commit; a / in a branch's name is written %2F.",
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return MissingError(
            f"{url} does not exist: the hub has no such repository, or it is private.",
            f"Check its name; if it is private, {_TOKEN}.",
        )
    if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code == 401:
        return UsageError(
            f"{url} cannot be read: the hub does not know the token that it was sent.",
            "Check HF_TOKEN, or run `hf auth login`.",
        )
    return None
