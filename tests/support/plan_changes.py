"""Changes that a plan prices, as a user would write them."""

import contextlib
import shlex
from collections.abc import Iterator

from parallax.analysis.planned.layouts import flags_of, with_keys
from parallax.analysis.planned.plan import single_changes
from parallax.analysis.planned.topology import Topology
from parallax.config.settings import Settings
from parallax.errors import ConfigError


def changes_of(settings: Settings, topology: Topology) -> Iterator[tuple[str, Settings]]:
    """The flags of each single change, and the settings with it."""
    for values in single_changes(settings, topology):
        with contextlib.suppress(ConfigError):  # not allowed with others of the section
            yield shlex.join(flags_of(values)), with_keys(settings, values)
