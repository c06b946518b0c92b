"""What tests of the trunk ask of `removal` too."""

from __future__ import annotations

# Of the exceptions that take other arguments than a text: what one is made of.
EXCEPTIONS = {"StrangeError": (("/runs/step-1", "has a link in it"), {})}
