"""What tests of others ask of the reader too."""

from __future__ import annotations

import ckptconv

# Calls that open a checkpoint.
OPENING = [ckptconv.DistributedReader]
# Calls that take the option `states`, which was called otherwise.
TAKING_STATES = [ckptconv.DistributedReader]
