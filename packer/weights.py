"""Which weight each drive gets: the user's, those of the pack that is gone on with, measured ones, or equal ones.

Sits between the command line and plan.py. Never measures twice for one container: a layout must not change while it is
made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from colibri.core.container import ContainerError
from colibri.core.container_survey import read_manifest
from colibri.packer.arguments import Drive
from colibri.packer.bandwidth import DriveRate, NoRoomError, measure, weights_of
from colibri.packer.folders import by_file_system, require_empty
from colibri.packer.journal import journal_weights

Measure = Callable[[Sequence[Path]], list[DriveRate]]


@dataclass(frozen=True)
class Weights:
    """The drives' weights, the primary first, what was measured to get them, and why nothing could be."""

    values: list[int]
    rates: list[DriveRate] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return lines for people: what was measured."""
        return [f"{rate.text()}: weight {weight}" for rate, weight in zip(self.rates, self.values, strict=False)]


def given_weights(drives: Sequence[Drive]) -> list[int] | None:
    """Return the weights that the user gave, 1 where one is left out; None if none was given."""
    if all(drive.weight is None for drive in drives):
        return None
    return [drive.weight or 1 for drive in drives]


def choose_weights(drives: Sequence[Drive], measure: Measure = measure) -> Weights:
    """Decide the weights of a container to be made in the drives' folders, which exist.

    Measures only where no weight is given, nothing is gone on with, and the folders lie on several file systems;
    where there is no room to measure, the weights are equal. Raises FolderError for folders that are in use otherwise,
    DriveError, CoreError.
    """
    given = given_weights(drives)
    if given is not None:
        return Weights(given)
    folders = [drive.folder for drive in drives]
    known = known_weights(folders)
    if known is not None:
        return Weights(known)
    if len(by_file_system(folders)) == 1:
        return Weights([1] * len(folders))
    require_empty(folders)
    try:
        rates = measure(folders)
    except NoRoomError as error:  # whether the container itself has room is for the pack to say
        return Weights([1] * len(folders), warnings=[f"{error}: the drives get equal shares"])
    return Weights(weights_of(rates), rates)


def known_weights(folders: Sequence[Path]) -> list[int] | None:
    """Return the weights of the unfinished or finished container in the folders, if it has as many stripes."""
    weights = journal_weights(folders[0]) if folders[0].is_dir() else None
    if weights is None:
        try:
            weights = [stripe.weight for stripe in read_manifest(folders[0]).layout.stripes]
        except ContainerError:
            return None  # nothing, or nothing that one can go on with: the pack itself will say so
    return weights if len(weights) == len(folders) else None
