"""What tests of the trunk ask of HTTP too."""

from __future__ import annotations

# Words that are refused with this exit code, and what is said.
SAID = [("convert model.pt --manifest https://host/m.json", 2, "cannot be written to http:")]
# Inputs, whether they are directories, templates, and what outputs are called.
CALLED = [("https://host/a%20b/x.pt?download=1", False, "", "out/x.safetensors")]
