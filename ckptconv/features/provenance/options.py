"""The option of conversions, and of `finish`, for statements."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH
from ckptconv.options.option import Given, option

OTHER_OPTIONS = {
    "--provenance --sign --attestation --slsa --sbom": "Use --attest FILE, with --digest sha256.",
    "--sha256 --hash --checksums": "Use --digest sha256.",
}


class Stating(Given):
    """The place for statements about the outputs."""

    attest: str = option(
        PATH,
        "Write digests and provenance to FILE as an unsigned OpenSSF Model Signing statement. Requires --digest.",
        metavar="FILE",
        group=OUTPUT,
    )


GIVEN = Stating
