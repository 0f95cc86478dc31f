"""foresight: what is worth least for its room goes first, as kinds and ages tell, unless heat did better lately."""

from __future__ import annotations

from kvtier.policy import Foreseeing


class Foresight(Foreseeing):
    """How the chance to be used falls with age is learnt too, and with it when waiting does not pay any more."""

    powers = (0.5,)
