"""The option of conversions, and of `finish`, for statements."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH
from ckptconv.options.option import Given, option


class Stating(Given):
    """Where statements about the outputs go."""

    attest: str = option(
        PATH,
        "Write there, to be signed, the digests as OpenSSF Model Signing has them, and the provenance; needs --digest.",
        metavar="FILE",
        group=OUTPUT,
    )


GIVEN = Stating
