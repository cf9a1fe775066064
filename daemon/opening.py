"""From a configuration to a container, a text model and a memory plan: what serve, plan and check have in common.

Opens and checks, allocates nothing, binds nothing, takes no lock but the container's shared one. Every failure is a
StartError with the exit code that tells a service manager whether another try makes sense.
"""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.core import core
from colibri.core.container import Container, ContainerError, open_container
from colibri.core.errors import CoreError
from colibri.daemon.admin_service import ModelFacts
from colibri.daemon.chat import TextError, TextModel
from colibri.daemon.config import Config
from colibri.daemon.machine import anonymous_bytes, available_memory
from colibri.daemon.model_port import PAGE_POSITIONS
from colibri.daemon.plan import CoreBytes, MemoryTable, PlanError, Sizes, make_table, resolve_sizes, ring_slots
from colibri.daemon.store.folder import OWN_FOLDERS

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_TEMPORARY = 75
EXIT_CONFIG = 78

_APART = "; give the state a folder of its own"


class StartError(Exception):
    """The daemon cannot start; `exit_code` says how final that is. `plan` is the memory plan that does not fit."""

    def __init__(self, message: str, exit_code: int = EXIT_CONFIG, plan: PlanError | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.plan = plan

    def as_json(self) -> dict[str, object]:
        """ "error" in words; where a plan does not fit, its rows too."""
        if self.plan is None or self.plan.table is None:
            return {"ok": False, "error": str(self)}
        return {"ok": False, "error": self.plan.message, **self.plan.table.as_json()}


@dataclass
class Opened:
    """A container with everything that follows from it and the configuration. Close it."""

    config: Config
    container: Container
    text: TextModel
    sizes: Sizes
    table: MemoryTable
    options: core.ModelOptions
    kv_page_bytes: int
    dense_bytes: int

    @property
    def facts(self) -> ModelFacts:
        source = self.container.manifest.source
        return ModelFacts(
            name=source.name,
            architecture=source.architecture,
            content_id=self.container.content_id,
            max_context=self.sizes.max_context,
            kv_bytes_per_token=self.kv_page_bytes // PAGE_POSITIONS,
        )

    @property
    def streamed(self) -> str:
        layers = self.container.manifest.expert_layers
        stripes = len(self.container.stripe_paths)
        return (
            f"{self.table.experts} experts in {len(layers)} layers streamed from {stripes} "
            f"stripe{'' if stripes == 1 else 's'}, {self.table.expert_slots} kept in memory"
        )

    @property
    def reading(self) -> str:
        """How experts are read, as configured."""
        return reading_text(self.config)

    def close(self) -> None:
        self.container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reading_text(config: Config) -> str:
    """How experts are read and looked after, as configured."""
    depth = config.io_depth or "default"
    scrub = f"{config.scrub:g} MB/s" if config.scrub else "off"
    heat = f"{config.heat_half_life:g} steps" if config.heat_half_life else "default"
    trace = f"; routing recorded in {config.trace}" if config.trace else ""
    return (
        f"experts read with io_backend {config.io_backend} (io_depth {depth}), direct {config.direct}, verify "
        f"{config.verify}; lookahead {config.lookahead}; pins {config.pins} (heat_half_life {heat}); scrub {scrub}"
        f"{trace}"
    )


def pins_wanted(pins: str, slots: int, experts: int) -> bool:
    """Whether learned heat is kept and used: with auto, where something has to be chosen."""
    return pins == "on" or (pins == "auto" and slots < experts)


def open_model(config: Config) -> Opened:
    """Raises StartError."""
    check_state_apart(config)
    container = open_the_container(config)
    try:
        text = open_text(container)
        sizes, table, options, plan = plan_memory(config, container, text)
    except BaseException:
        container.close()
        raise
    return Opened(config, container, text, sizes, table, options, plan.kv_page_bytes, plan.dense_bytes)


def check_state_apart(config: Config) -> None:
    """Raises StartError where the state folder and a folder of the container are in each other's way: both have a LOCK,
    and the daemon removes what nobody refers to from the state folder's own folders."""
    for what, folder in (("container", config.container), *(("stripe folder", stripe) for stripe in config.stripes)):
        if _same(config.state, folder):
            raise StartError(f"state folder {config.state} is the same folder as {what} {folder}{_APART}")
        if _inside(config.state, folder):
            raise StartError(f"state folder {config.state} lies inside {what} {folder}{_APART}")
        for part in OWN_FOLDERS:
            own = config.state / part
            if _same(folder, own) or _inside(folder, own):
                raise StartError(f"{what} {folder} lies in {own}, which belongs to the state folder{_APART}")


def _inside(path: Path, folder: Path) -> bool:
    return any(_same(above, folder) for above in path.resolve().parents)


def _same(path: Path, other: Path) -> bool:
    """By what is there, where it is there: two names may be one folder."""
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()


def open_the_container(config: Config) -> Container:
    """Raises StartError."""
    try:
        container = open_container(config.container, config.stripes)
    except ContainerError as error:
        raise StartError("; ".join([str(error), *_unmounted(config)])) from error
    except OSError as error:
        raise StartError(f"container {config.container}: {error}", EXIT_TEMPORARY) from error
    if not experts_of(container):
        container.close()
        raise StartError(
            f"container {config.container}: it has no experts to stream, so this daemon is of no use to it"
        )
    return container


def _unmounted(config: Config) -> list[str]:
    """A word on each folder that is empty, as the mount point of a drive is that is not mounted."""
    hints = []
    for folder in (config.container, *config.stripes):
        with contextlib.suppress(OSError):
            if not set(os.listdir(folder)) - {"LOCK", "lost+found"}:
                hints.append(f"{folder} is empty: is its drive mounted?")
    return hints


def open_text(container: Container) -> TextModel:
    """Raises StartError."""
    try:
        return TextModel.open(container.primary, vocab_rows=container.manifest.spec.vocab_size)
    except (TextError, OSError) as error:
        raise StartError(f"text files of the container: {error}") from error


def experts_of(container: Container) -> int:
    return sum(layer.experts for layer in container.manifest.expert_layers)


def plan_memory(
    config: Config, container: Container, text: TextModel
) -> tuple[Sizes, MemoryTable, core.ModelOptions, core.MemoryPlan]:
    """Raises StartError with the table where it does not fit."""
    gc.collect()  # what opening left behind is not part of the process's size
    try:
        sizes = resolve_sizes(config, container.manifest.spec.max_positions)

        def options(slots: int) -> core.ModelOptions:
            return model_options(config, sizes, slots, tuple(text.banned_ids()))

        def estimate(slots: int) -> CoreBytes:
            return core.plan(container, options(slots))

        table = make_table(config, sizes, experts_of(container), estimate, available_memory(), anonymous_bytes())
        chosen = options(table.expert_slots)
        return sizes, table, chosen, core.plan(container, chosen)
    except PlanError as error:
        raise StartError(str(error), plan=error) from error
    except CoreError as error:
        raise StartError(str(error)) from error


def model_options(config: Config, sizes: Sizes, slots: int, banned: tuple[int, ...]) -> core.ModelOptions:
    """The core's options for this configuration."""
    return core.ModelOptions(
        expert_slots=slots,
        kv_pages=sizes.kv_pages,
        ring_slots=ring_slots(config, slots),
        kv_dtype=config.kv_dtype,  # type: ignore[arg-type]  # checked by config.py
        max_rows=config.max_sequences,
        pass_tokens=sizes.pass_tokens,
        max_context=sizes.max_context,
        activation=config.activation,  # type: ignore[arg-type]
        isa=config.isa,
        threads=config.threads,
        lookahead=config.lookahead,  # type: ignore[arg-type]
        io_backend=config.io_backend,  # type: ignore[arg-type]
        io_depth=config.io_depth,
        io_threads=config.io_threads,
        verify=config.verify,  # type: ignore[arg-type]
        heat_half_life=config.heat_half_life,
        direct=config.direct,  # type: ignore[arg-type]
        banned_tokens=banned,
    )
